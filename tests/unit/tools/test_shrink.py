"""A shrunk recipe: two ranks along each axis within so many processes, batches that divide, the same switches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nemo_rl.cli.main import app
from nemo_rl.config.load import load_config
from nemo_rl.config.policy import ParallelSizes
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import ConfigError, DatasetError, ModelFolderError
from nemo_rl.utils.console import make_console
from nemo_rl_tools.shrink import odd_share
from nemo_rl_tools.shrink.changes import changes_of, small_layout
from nemo_rl_tools.shrink.run import SHRUNK, ShrinkRequest, shrink, write_recipe

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "configs" / "recipes"
SIZE = st.sampled_from([1, 2, 4, 8])


@given(tensor=SIZE, pipeline=SIZE, context=SIZE, expert=SIZE, own=SIZE, data=SIZE, most=st.sampled_from([1, 4, 8]))
def test_a_small_layout_is_one_and_says_what_it_gave_up(tensor, pipeline, context, expert, own, data, most):
    real = ParallelSizes(tensor=tensor, pipeline=pipeline, context=context, expert=expert, expert_tensor=own)
    layout = small_layout(real, real.replica_size * data, max_workers=most)
    sizes = layout.sizes
    assert layout.workers <= most and layout.workers % sizes.replica_size == 0
    assert layout.workers % (sizes.expert * sizes.expert_tensor * sizes.pipeline) == 0
    copied = small_layout(replace(real, copies=data), real.replica_size * data, max_workers=most)
    assert copied.sizes.copies == min(data, 2) or layout.data * sizes.context == 1
    axes = {
        "tensor": (tensor, sizes.tensor),
        "pipeline": (pipeline, sizes.pipeline),
        "context": (context, sizes.context),
        "expert": (expert, sizes.expert),
        "expert tensor": (own, sizes.expert_tensor),
        "data": (data, layout.data),
    }
    for name, (before, after) in axes.items():
        is_given_up = any(text.startswith(f"{name} parallel:") for text in layout.reduced)
        assert after >= min(before, 2) or is_given_up, (name, layout)


def small(tmp_path: Path, recipe: Path, *overrides: str) -> MasterConfig:
    config = load_config(recipe, overrides)
    layout = small_layout(config.policy.parallel_sizes, config.cluster.num_workers, max_workers=8)
    changes = changes_of(config, layout, steps=3, out=tmp_path, model=tmp_path / "model", num_layers=4)
    return write_recipe(tmp_path, recipe, overrides, changes)


def test_a_recipe_of_supervised_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compared by its kept steps, which supervised training does not keep"):
        small(tmp_path, RECIPES / "sft_smollm2_cpu.yaml")


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("grpo_*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_has_a_small_one_with_its_switches(recipe: Path, tmp_path: Path) -> None:
    real, made = load_config(recipe), small(tmp_path, recipe)
    assert made.cluster.gpus_per_node == 0 and made.cluster.num_nodes == 1
    for name in ("loss_fn", "router_replay", "impl"):
        sides = [
            # A teacher is made small as the policy is.
            {
                "loss_fn": c.loss_fn.model_copy(update={"distillation": c.loss_fn.distillation.enabled}),
                "router_replay": c.policy.router_replay,
                "impl": c.active_data_plane.impl,
            }[name]
            for c in (real, made)
        ]
        assert sides[0] == sides[1]
    assert made.policy.sequence_packing.enabled == real.policy.sequence_packing.enabled
    assert made.grpo.adv_estimator == real.grpo.adv_estimator
    assert (made.data.validation is None) == (real.data.validation is None)


def test_overrides_are_in_the_small_recipe_also_deleted_ones(tmp_path: Path) -> None:
    recipe = RECIPES / "grpo_math_1b.yaml"
    made = small(tmp_path, recipe, "grpo.seed=9", "~policy.optimizer.kwargs.betas", "~policy.scheduler.min_factor")
    assert made.grpo.seed == 9 and set(made.policy.optimizer.kwargs) == {"lr", "weight_decay"}
    assert made.policy.scheduler.min_factor == 0.1
    assert load_config(tmp_path / SHRUNK) == made


def test_an_asynchronous_recipe_keeps_its_bound_and_its_engines_apart(tmp_path: Path) -> None:
    apart, bound = "policy.generation.colocated", ("grpo.async.max_staleness=3", "policy.generation.in_flight=drain")
    given = ("grpo.async.enabled=true", "grpo.use_generation_logprobs_as_prev=true", *bound)
    engines = (f"{apart}.enabled=false", f"{apart}.gpus_per_node=4", "policy.generation.num_replicas=4")
    made = small(tmp_path, RECIPES / "grpo_math_1b.yaml", *given, *engines)
    assert made.grpo.async_.enabled and made.grpo.async_.max_staleness == 3
    assert made.policy.generation.in_flight == "drain" and not made.policy.generation.colocated.enabled
    assert load_config(tmp_path / SHRUNK) == made


def test_switches_for_gpus_alone_are_off_and_unequal_stages_stay_unequal(tmp_path: Path) -> None:
    megatron = "policy.megatron_cfg"
    made = small(
        tmp_path,
        RECIPES / "grpo_qwen3_30b_a3b_8n8g_r3.yaml",
        *(f"{megatron}.{name}=true" for name in ("apply_rope_fusion", "moe_permute_fusion")),
        *(f"{megatron}.num_layers_in_{end}_pipeline_stage=3" for end in ("first", "last")),
        f"{megatron}.recompute_num_layers=3",
    )
    section = made.policy.megatron_cfg
    assert not (section.apply_rope_fusion or section.moe_permute_fusion)
    assert (section.num_layers_in_first_pipeline_stage, section.num_layers_in_last_pipeline_stage) == (1, 3)
    assert section.recompute_num_layers == 1


def test_what_depends_on_rewards_and_lengths_is_sized_anew(tmp_path: Path) -> None:
    shaping = "grpo.reward_shaping"
    made = small(
        tmp_path,
        RECIPES / "grpo_math_1b.yaml",
        *("grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=3", "grpo.dynamic_sampling_max_gen_batches=4"),
        *(f"{shaping}.enabled=true", f"{shaping}.max_response_length=${{policy.generation.max_new_tokens}}"),
        "+data.validation_sets.more={dataset_name: jsonl, data_path: nowhere.jsonl}",
    )
    assert not made.grpo.use_dynamic_sampling and made.grpo.batch_multiplier == 1.0
    assert made.grpo.reward_shaping.enabled and made.data.validation_sets == {}
    assert made.grpo.reward_shaping.max_response_length == made.policy.generation.max_new_tokens


def test_a_recipe_is_written_without_being_run(tmp_path: Path) -> None:
    recipe = RECIPES / "grpo_llama3.1_8b_2n8g.yaml"
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["shrink", str(recipe), "--no-run", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "16 workers (tp 2, dp 8, sp) -> 4 workers (tp 2, dp 2, sp)" in done.output and "not run" in done.output
    assert yaml.safe_load((out / SHRUNK).read_text())["defaults"] == "recipe.yaml"
    as_json = CliRunner().invoke(app, ["shrink", str(recipe), "--no-run", "--json", "--out", str(out)])
    assert yaml.safe_load(as_json.stdout)["verdict"] == "pass"


def test_a_model_of_unknown_shape_and_broken_prompts_are_refused(tmp_path: Path) -> None:
    recipe, console = RECIPES / "grpo_math_1b.yaml", make_console()

    def refused(*overrides: str) -> None:
        shrink(ShrinkRequest(recipe=recipe, overrides=overrides, out=tmp_path / "out"), console=console)

    with pytest.raises(ModelFolderError, match="nor a model whose shape is known"):
        refused("policy.model_name=models/Mine-7B")
    broken = tmp_path / "train.jsonl"
    broken.write_text('{"question": "1+1"}\n')
    with pytest.raises(DatasetError, match="input"):
        refused(f"data.train.data_path={broken}")
    with pytest.raises(ConfigError, match="grpo.sed"):
        refused("grpo.sed=1")
    assert not (tmp_path / "out").exists()


def test_the_reward_differs_between_texts() -> None:
    assert odd_share("", "", None) == 0 and odd_share("", "a", None) == 1 and odd_share("", "ab", None) == 0.5
