"""A plan's arithmetic, its refusals with the cheapest change, and its command, without any process of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nemo_rl.algorithms.losses.policy_loss import build_loss
from nemo_rl.algorithms.stages.columns import PARTITION, declare_partition, stage_columns
from nemo_rl.algorithms.start import planned_stages
from nemo_rl.cli.main import app
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.load import load_config
from nemo_rl.data_plane.column_io import kv_first_write
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.interfaces import DataPlaneClient
from nemo_rl.data_plane.schema import FIELDS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import ConfigError, ModelFolderError, ResourceError
from nemo_rl.models.head.logits import SUPPORT, SupportRecorder
from nemo_rl.routes.columns import encode_routes
from nemo_rl.routes.shape import RouteShape
from nemo_rl_tools.plan import FORMAT_VERSION, RunPlan
from nemo_rl_tools.plan.activations import pass_activations
from nemo_rl_tools.plan.command import changes_of, plan_recipe
from nemo_rl_tools.plan.setting import GPUS, gpu_named
from tests.helpers.vision_models import write_vision_folder
from tests.repo.walk_docs import ROOT, blocks_of

DEMO, MATH = ROOT / "configs" / "grpo_sort_cpu.yaml", ROOT / "configs" / "recipes" / "grpo_math_1b.yaml"
MOE = ROOT / "configs" / "recipes" / "grpo_sort_moe_r3_megatron_cpu.yaml"
LLAMA_8B = (
    *("policy.model_name=models/Llama-3.1-8B-Instruct", "policy.generation.num_replicas=16"),
    *("policy.max_total_sequence_length=4096", "policy.generation.max_new_tokens=3072"),
    *("policy.dynamic_batching.train_mb_tokens=8192", "policy.dynamic_batching.logprob_mb_tokens=16384"),
)
MEGATRON = "policy.megatron_cfg"
QWEN_30B = (
    *("policy.model_name=models/Qwen3-30B-A3B", "policy.generation.num_replicas=64"),
    *("policy.dtensor_cfg.enabled=false", "policy.dtensor_cfg.activation_checkpointing=false"),
    *("~policy.optimizer", "~policy.scheduler", f"{MEGATRON}.enabled=true", f"{MEGATRON}.sequence_parallel=true"),
    *(f"{MEGATRON}.tensor_model_parallel_size=4", f"{MEGATRON}.pipeline_model_parallel_size=2"),
    *(f"{MEGATRON}.context_parallel_size=2", f"{MEGATRON}.expert_model_parallel_size=8"),
    *(f"{MEGATRON}.expert_tensor_parallel_size=1", f"{MEGATRON}.activation_checkpointing=true"),
    *("policy.dynamic_batching.enabled=false", "policy.sequence_packing.enabled=true"),
    *("policy.sequence_packing.train_mb_tokens=16384", "policy.sequence_packing.logprob_mb_tokens=16384"),
    *("policy.max_total_sequence_length=8192", "policy.generation.max_new_tokens=7168"),
    *("policy.router_replay.enabled=true", "policy.generation.max_batch_size=16"),
)


MEGATRON = ("policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true")
PIPELINE = "policy.megatron_cfg.pipeline_model_parallel_size=2"


def planned(recipe: Path, *overrides: str, gpu: str | None = None, nodes: int | None = None) -> RunPlan:
    """Of a recipe that fits."""
    plan, error = plan_recipe(recipe, overrides=overrides, gpu=gpu, nodes=nodes)
    assert error is None, error
    assert plan.fits
    return plan


def refused(recipe: Path, *overrides: str, gpu: str | None = None, nodes: int | None = None) -> str:
    plan, error = plan_recipe(recipe, overrides=overrides, gpu=gpu, nodes=nodes)
    assert isinstance(error, ResourceError) and not plan.fits
    return str(error)


def test_every_gpu_has_a_peak_and_its_name_is_found_in_any_case() -> None:
    assert all(gpu.tflops("bfloat16") > 0 for gpu in GPUS.values())
    assert gpu_named("h100-80g").tflops("bfloat16") == 989.0
    assert gpu_named("H100-PCIE-80G").tflops("bfloat16") == 756.0
    with pytest.raises(ConfigError, match=r"--gpu: expected one of A10-24G, .* got 'V100'"):
        gpu_named("V100")


def test_the_batches_are_those_that_the_run_plans() -> None:
    batches = planned(MATH, gpu="H100-80G").batches
    assert (batches.rows, batches.tokens, batches.global_batches) == (512, 512 * 1536, 1)
    # 64 rows of 1,536 tokens on each of 8 ranks, 10 to a microbatch of 16,384.
    assert (batches.rows_per_rank, batches.train_microbatches, batches.train.rows) == (64, 7, 10)
    assert batches.logprob.rows == 21 and batches.train.predicted == 1024


def test_ranks_and_engines_lie_as_the_run_places_them() -> None:
    plan = planned(MATH, *LLAMA_8B, gpu="H100-80G", nodes=2)
    assert [len(node.devices) for node in plan.nodes] == [8, 8]
    assert plan.nodes[1].devices[0].rank == plan.nodes[1].engines[0] == 8
    assert "rollout worker" in plan.nodes[0].others and plan.nodes[1].others == ()


WHOLE_GRADIENTS = "policy.dtensor_cfg.gradient_accumulation=whole"


def test_settings_of_two_and_of_eight_nodes_are_accepted() -> None:
    dense = planned(MATH, *LLAMA_8B, gpu="H100-80G", nodes=2)
    # Sixteen ranks share 8.03e9 weights in float32, their gradients and two moments.
    [rank] = dense.ranks
    assert rank.weights == pytest.approx(8_030_261_248 * 4 / 16, rel=0.01)
    assert (rank.gradients, rank.optimizer) == (rank.weights, 2 * rank.weights)
    assert rank.summed_gradients == 0
    [kept] = planned(MATH, *LLAMA_8B, WHOLE_GRADIENTS, gpu="H100-80G", nodes=2).ranks
    assert kept.summed_gradients == pytest.approx(8_030_261_248 * 4, rel=0.01)
    mixture = planned(MATH, *QWEN_30B, gpu="H100-80G", nodes=8)
    assert len(mixture.ranks) == 2 and mixture.setting.layout.dp == 4
    assert mixture.plane.columns["routed_experts"] == mixture.batches.tokens * 48 * 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5_1.5b_1gpu", "llama3.1_8b_2n8g", "qwen3_30b_a3b_8n8g_r3"])
def test_a_recipe_for_gpus_fits_them(name: str) -> None:
    planned(ROOT / "configs" / "recipes" / f"grpo_{name}.yaml", gpu="H100-80G")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5_7b_1n8g", "qwen3_14b_1n8g", "qwen3_30b_a3b_2n8g"])
def test_a_dense_model_and_a_mixture_leave_room_without_tensor_parallelism(name: str) -> None:
    plan = planned(ROOT / "configs" / "recipes" / f"grpo_{name}.yaml", gpu="H100-80G")
    [rank] = plan.ranks
    assert plan.setting.layout.tp == 1 and rank.summed_gradients == 0
    assert max(rank.stages().values()) < 70e9


def test_a_frozen_tower_has_no_gradients_and_no_state_of_the_optimizer(tmp_path: Path) -> None:
    recipe, folder = ROOT / "configs" / "grpo_sort_cpu.yaml", write_vision_folder(tmp_path / "model", "qwen2_5_vl")
    trained, frozen = (
        planned(recipe, f"policy.model_name={folder}", f"policy.vision.freeze_tower={flag}").ranks[0]
        for flag in ("false", "true")
    )
    assert trained.weights == frozen.weights and trained.gradients == trained.weights
    assert frozen.gradients < trained.gradients and frozen.optimizer == 2 * frozen.gradients


def test_engines_apart_have_gpus_and_nodes_of_their_own() -> None:
    apart = "policy.generation.colocated"
    given = (f"{apart}.enabled=false", f"{apart}.num_nodes=1", f"{apart}.gpus_per_node=8", "cluster.address=auto")
    plan = planned(MATH, *given, "policy.generation.num_replicas=8", gpu="H100-80G")
    assert [(len(node.devices), node.engines, node.cpus > 0) for node in plan.nodes] == [
        (8, (), True),
        (0, tuple(range(8)), True),
    ]
    assert all(rank.engine is None for rank in plan.ranks)
    whole = (*LLAMA_8B, *given, "policy.generation.num_replicas=8", "policy.dtensor_cfg.tensor_parallel_size=2")
    assert "an engine's GPU needs" in refused(MATH, *whole, gpu="A10-24G")


def test_what_does_not_fit_is_refused_with_the_cheapest_change() -> None:
    kept = "policy.dtensor_cfg.activation_checkpointing=false"
    text = refused(MATH, kept, gpu="A100-40G")
    assert "train: a GPU needs" in text and "A100-40G has" in text
    found = re.search(r"The cheapest change that fits: (.*) \((.*)\)$", text)
    assert found is not None and found[2] == "more microbatches"
    # It really fits, and the next cheaper candidate of its kind does not.
    planned(MATH, kept, *found[1].split(), gpu="A100-40G")
    twice = [re.sub(r"\d+$", lambda number: str(2 * int(number[0])), part) for part in found[1].split()]
    refused(MATH, kept, *twice, gpu="A100-40G")


@pytest.mark.slow
def test_recomputation_or_nodes_are_found_where_batches_are_small_already() -> None:
    small = ("policy.dynamic_batching.train_mb_tokens=4096", "policy.dynamic_batching.logprob_mb_tokens=4096")
    given = (*LLAMA_8B[:4], *small, "policy.dtensor_cfg.activation_checkpointing=false")
    text = refused(MATH, *given, "policy.generation.max_batch_size=1", gpu="A100-40G", nodes=2)
    assert re.search(r"The cheapest change that fits: policy\.dtensor_cfg\.", text), text


@pytest.mark.slow
def test_no_single_change_is_said_where_none_is_enough() -> None:
    text = refused(MATH, "policy.model_name=models/Llama-3.1-70B", gpu="A10-24G")
    assert "No single change that was tried fits" in text


def test_candidates_come_in_the_order_of_their_cost() -> None:
    costs = [change.cost for change in changes_of(planned(MATH, gpu="H100-80G").setting)]
    order = list(dict.fromkeys(costs))
    assert order == [
        *("more rounds of decoding", "more microbatches", "more communication"),
        *("weights cross to the GPU each pass", "slower rollouts", "more machines"),
    ]


@pytest.mark.slow
def test_a_store_without_room_for_a_step_is_refused() -> None:
    text = refused(DEMO, "data_plane.storage_capacity.bytes=100000")
    assert "data_plane.storage_capacity.bytes leaves room for" in text
    assert "The cheapest change that fits: data_plane.storage_capacity.bytes=" in text


@pytest.mark.slow
def test_recomputation_and_sharding_need_less() -> None:
    plain = planned(MATH, "policy.dtensor_cfg.activation_checkpointing=false", gpu="H200-141G")
    whole = "policy.dtensor_cfg.gradient_accumulation=whole"
    again = planned(MATH, whole, gpu="H200-141G")
    assert again.ranks[0].train.layers < plain.ranks[0].train.layers / 5
    assert planned(MATH, gpu="H200-141G", nodes=1).ranks[0].weights == plain.ranks[0].weights
    copies = planned(MATH, "policy.dtensor_cfg.replicate_size=2", gpu="H200-141G")
    assert copies.ranks[0].weights == pytest.approx(2 * plain.ranks[0].weights, rel=0.01)
    split = planned(MATH, whole, "policy.dtensor_cfg.tensor_parallel_size=2", gpu="H200-141G")
    # A tile of half the columns has twice the rows.
    assert split.ranks[0].train.logits <= again.ranks[0].train.logits
    # All but the norms and a few biases are split.
    assert split.ranks[0].summed_gradients == pytest.approx(again.ranks[0].summed_gradients / 2, rel=0.01)


def test_a_pipeline_stage_holds_as_many_microbatches_as_are_under_way() -> None:
    setting = planned(MATH, *QWEN_30B, gpu="H100-80G", nodes=8)
    first, last = (
        pass_activations(
            setting.setting, setting.batches.train, stage=stage, num_microbatches=8, with_gradients=True
        ).in_flight
        for stage in range(2)
    )
    assert (first, last) == (2, 1)


@pytest.mark.parametrize("bit_packed", [False, True])
def test_the_rows_of_a_step_take_the_planned_bytes_in_a_data_plane(bit_packed: bool) -> None:
    plan = planned(
        MOE,
        *(
            "policy.model_name=checkpoints/starter_sort_moe",
            f"policy.router_replay.bit_packed={str(bit_packed).lower()}",
        ),
        *(
            "grpo.num_prompts_per_step=4",
            "policy.train_global_batch_size=32",
            "loss_fn.reference_policy_kl_penalty=0.1",
        ),
    )
    rows, width = plan.batches.rows, plan.batches.row_tokens
    shape = RouteShape(layers=(0, 1, 2, 3), top_k=2, num_experts=8)
    routes = torch.nested.nested_tensor(
        [torch.tensor([0, 1]).repeat(width, 4, 1).to(torch.int16)] * rows, layout=torch.jagged
    )
    columns = full_columns(plan, rows) | dict(encode_routes(routes, shape, bit_packed=bit_packed))
    with partition_of(plan) as client:
        put(client, columns, range(rows))
        assert plan.plane.rows_bytes == pytest.approx(client.stats()["live_bytes"], rel=0.02)
    assert plan.plane.rows_bytes == plan.plane.step_bytes and plan.plane.rows == rows


def test_rows_that_wait_and_kept_sets_take_the_planned_bytes_too() -> None:
    plan = planned(
        DEMO,
        *("grpo.num_prompts_per_step=4", "policy.train_global_batch_size=32", "grpo.use_dynamic_sampling=true"),
        *("grpo.batch_multiplier=1.5", "policy.generation.top_k=3", "policy.generation.record_support=true"),
    )
    rows, alive = plan.batches.rows, plan.plane.rows
    assert (rows, alive) == (32, (4 + 6) * 8)
    # The longest that sets of three may be: two distances that take two bytes each.
    vocab, response = plan.setting.model.flops_shape.vocab_size, plan.batches.response_tokens
    recorder, count = SupportRecorder(), alive * response
    kept = torch.zeros(count, vocab, dtype=torch.bool)
    kept[:, [0, 130, 260]] = True
    recorder.add_turn(kept, torch.zeros(count, dtype=torch.int64), torch.arange(alive).repeat_interleave(response))
    sets = torch.stack(recorder.rows(alive))
    assert sets.shape[1] == 5 * response
    columns = full_columns(plan, alive) | {SUPPORT: sets}
    computed = [name for name in columns if FIELDS[name].produced_by in ("prev_logprobs", "advantages")]
    assert computed
    with partition_of(plan) as client:
        put(client, columns, range(rows))
        waiting = {name: column[rows:] for name, column in columns.items() if name not in computed}
        put(client, waiting, range(rows, alive))
        assert plan.plane.rows_bytes == pytest.approx(client.stats()["live_bytes"], rel=0.02)
    assert plan.plane.step_bytes < 0.5 * plan.plane.rows_bytes
    guessed = planned(DEMO, "policy.generation.top_p=0.9", "policy.generation.record_support=true")
    assert any("top-p 0.9 keeps 64 tokens" in line for line in guessed.assumptions())
    assert not any("keeps" in line for line in plan.assumptions())


def full_columns(plan: RunPlan, rows: int) -> dict[str, torch.Tensor]:
    """As many rows of full length, of columns that need no encoding."""
    columns = {}
    for name in plan.plane.columns:
        spec = FIELDS[name]
        if spec.is_token_aligned or not spec.is_ragged:
            sizes = (rows, plan.batches.row_tokens) if spec.is_token_aligned else (rows,)
            columns[name] = torch.zeros(sizes, dtype=vars(torch)[spec.dtypes[0]])
    columns["input_lengths"] = torch.full((rows,), plan.batches.row_tokens, dtype=torch.int32)
    return columns


@contextmanager
def partition_of(plan: RunPlan) -> Iterator[DataPlaneClient]:
    config = plan.setting.config
    client = build_data_plane_client(DataPlaneConfig(impl="noop"), run_id="planned")
    try:
        declare_partition(client, stage_columns(config, build_loss(config.loss_fn, config.grpo)), config.grpo)
        yield client
    finally:
        client.close()


def put(client: DataPlaneClient, columns: Mapping[str, torch.Tensor], rows: range) -> None:
    part = {name: column[: len(rows)] if len(column) > len(rows) else column for name, column in columns.items()}
    keys = [f"uid{row // 8}_g{row % 8}" for row in rows]
    kv_first_write(client, BatchedDataDict(part), keys, partition_id=PARTITION)


def test_bounds_follow_the_arithmetic() -> None:
    plan = planned(MATH, gpu="H100-80G")
    bounds = {bound.stage: bound for bound in plan.bounds}
    # 6 operations per weight and token at the least, over 8 GPUs.
    least = 6 * 1_310_000_000 * plan.batches.tokens / (8 * 989e12)
    assert least < bounds["train"].arithmetic_s < 1.6 * least
    assert bounds["prev_logprobs"].arithmetic_s == pytest.approx(bounds["train"].arithmetic_s / 3)
    assert bounds["rollout"].limited_by == "memory"
    assert planned(DEMO).bounds == ()


def test_what_is_asked_for_wrongly_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected the name of the GPU"):
        plan_recipe(MATH)
    with pytest.raises(ConfigError, match="cluster.gpus_per_node is 0"):
        plan_recipe(DEMO, gpu="H100-80G")
    with pytest.raises(ConfigError, match="divide"):
        plan_recipe(MATH, gpu="H100-80G", overrides=("policy.dtensor_cfg.tensor_parallel_size=3",))
    with pytest.raises(ModelFolderError, match="--model-config FILE"):
        plan_recipe(MATH, gpu="H100-80G", overrides=("policy.model_name=models/Nobody-1B",))


def test_a_save_beside_the_training_needs_a_copy_of_weights_and_optimizer() -> None:
    without, beside = (
        planned(DEMO, f"checkpointing.async_save={on}", "cluster.cpu_workers_per_node=2") for on in (False, True)
    )
    [rank] = beside.ranks
    more = {name: size for name, size in beside.hosts[0].items() if name not in without.hosts[0]}
    assert more == {"checkpoint being written": 2 * (rank.weights + rank.optimizer)}
    [small] = (planned(DEMO, "checkpointing.async_save=true", "checkpointing.save_optimizer=false").hosts,)
    assert small[0]["checkpoint being written"] < more["checkpoint being written"]


@pytest.mark.parametrize(("backend", "copies"), [("torch", 1), ("vllm", 3)])
def test_deltas_need_the_weights_that_were_sent_last(backend: str, copies: int) -> None:
    engine = f"policy.generation.backend={backend}"
    without, deltas = (planned(DEMO, engine, f"policy.generation.refit_delta.enabled={on}") for on in (False, True))
    more = {name: size for name, size in deltas.hosts[0].items() if name not in without.hosts[0]}
    # The policy's rank 0, and each of two engines that take full weights.
    assert more == {"weights sent last, for deltas": copies * deltas.engine.weights}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("cluster.cpu_workers_per_node=1",), "every policy rank reads all of it"),
        (("cluster.cpu_workers_per_node=2",), "a policy rank reads at most 50% of it"),
        (
            ("cluster.cpu_workers_per_node=2", "policy.dtensor_cfg.tensor_parallel_size=2"),
            "a policy rank reads at most 65% of it",
        ),
        (MEGATRON, "every policy rank reads all of it"),
        ((*MEGATRON, "cluster.cpu_workers_per_node=2"), "every policy rank reads all of it"),
        ((*MEGATRON, "cluster.cpu_workers_per_node=2", PIPELINE), "a policy rank reads at most 55% of it"),
        (("policy.generation.backend=vllm",), "vLLM engines read no weights"),
    ],
)
def test_a_plan_says_what_each_rank_reads_of_the_model_folder(overrides: tuple[str, ...], said: str) -> None:
    plan, _ = plan_recipe(DEMO, overrides=overrides, gpu=None, nodes=None)
    assert said in plan.reading()


LORA = ("policy.lora.enabled=true", "policy.lora.rank=16", "loss_fn.reference_policy_kl_penalty=0.01")


@pytest.mark.parametrize("worker", [(), MEGATRON])
def test_adapters_leave_gradients_and_optimizer_of_a_hundredth_and_no_reference(worker: tuple[str, ...]) -> None:
    without = (*worker, "~policy.optimizer", "~policy.scheduler") if worker else ()
    whole = planned(MATH, *without, LORA[-1], gpu="H100-80G")
    adapted = planned(MATH, *without, *LORA, gpu="H100-80G")
    [before], [after] = whole.ranks[:1], adapted.ranks[:1]
    # 2 (in + out) r elements for each layer of 2 x 16 of a 1.5B model: 1.2 % of its weights.
    assert 0.005 < after.gradients / before.gradients < 0.03 and after.optimizer / before.optimizer < 0.03
    assert 1.0 < after.weights / before.weights < 1.03
    assert "reference weights" in whole.hosts[0] and "reference weights" not in adapted.hosts[0]
    refit = {bound.stage: bound.seconds for bound in adapted.bounds}["refit"]
    assert refit < 0.1 * {bound.stage: bound.seconds for bound in whole.bounds}["refit"]
    train, logprobs = ({b.stage: b.arithmetic_s for b in plan.bounds}["train"] for plan in (adapted, whole))
    assert train == pytest.approx(logprobs * 2 / 3)
    merged = planned(MATH, *without, *LORA, "policy.lora.serve=merged", gpu="H100-80G")
    assert {b.stage: b.seconds for b in merged.bounds}["refit"] == {b.stage: b.seconds for b in whole.bounds}["refit"]


def test_json_has_its_version_and_whole_numbers() -> None:
    result = CliRunner().invoke(app, ["plan", str(DEMO), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["version"] == FORMAT_VERSION and found["fits"] is True
    [rank] = found["ranks"]
    assert rank["peak"] == max(rank["stages"].values()) and isinstance(rank["weights"], int)
    assert found["data_plane"]["columns"]["input_ids"] == 1024 * 48 * 4


def test_the_examples_of_the_page_run() -> None:
    commands = [
        line.split()[1:]
        for block in blocks_of("docs/cluster.md")
        for line in block.body.splitlines()
        # Seconds are those of test_time.
        if line.startswith("nemo-rl plan ") and "--time" not in line
    ]
    assert len(commands) >= 2
    for command in commands:
        words = [str(ROOT / word) if word.startswith("configs/") else word for word in command]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert result.output.rstrip().endswith("fits")


VLLM = ("policy.generation.backend=vllm", "policy.generation.vllm_cfg.tensor_parallel_size=2")


def test_ranks_of_an_engine_share_its_weights_and_leave_the_gpu_to_the_policy_while_it_trains() -> None:
    given = (
        *LLAMA_8B,
        *VLLM,
        "policy.generation.num_replicas=8",
        "policy.generation.vllm_cfg.gpu_memory_utilization=0.8",
    )
    plan = planned(MATH, *given, gpu="H100-80G", nodes=2)
    [rank] = plan.ranks
    engine = rank.engine
    assert engine is not None and engine.is_known and engine.sleep_level == 2 and engine.ranks == 2
    assert engine.weights == pytest.approx(8_030_261_248 * 2 / 2, rel=0.01)
    taken = engine.weights + engine.cache + engine.working
    assert taken == pytest.approx(0.8 * gpu_named("H100-80G").memory_bytes, rel=0.02)
    stages = rank.stages()
    assert stages["rollout"] == rank.fixed + taken
    assert stages["train"] == rank.fixed + rank.weights + rank.optimizer + rank.gradients + rank.train.peak
    assert stages["refit"] == rank.fixed + rank.weights + rank.refit + engine.weights + engine.loading
    assert [node.engines for node in plan.nodes] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [node.engine_ranks for node in plan.nodes] == [8, 8]
    assert [device.engine for device in plan.nodes[1].devices] == [4, 4, 5, 5, 6, 6, 7, 7]


def test_an_engine_that_does_not_sleep_keeps_its_share_of_the_gpu() -> None:
    given = (
        *LLAMA_8B,
        *VLLM,
        "policy.generation.num_replicas=8",
        "policy.generation.vllm_cfg.gpu_memory_utilization=0.8",
    )
    text = refused(MATH, *given, "policy.generation.sleep_level=0", gpu="H100-80G", nodes=2)
    assert "train: a GPU needs" in text
    kept = planned(MATH, *given, "policy.generation.sleep_level=1", gpu="H100-80G", nodes=2)
    assert kept.hosts[0]["weights of sleeping engines"] == 8 * kept.engine.weights


def test_a_cache_that_holds_no_row_is_refused() -> None:
    text = refused(
        MATH,
        *LLAMA_8B,
        *VLLM,
        "policy.generation.num_replicas=8",
        "policy.generation.vllm_cfg.gpu_memory_utilization=0.12",
        gpu="H100-80G",
        nodes=2,
    )
    assert "policy.generation.vllm_cfg.gpu_memory_utilization leaves" in text


def test_workers_are_told_the_sums_of_their_stages() -> None:
    found, [rank] = planned_stages(load_config(MATH, ())), planned(MATH, gpu="H100-80G").ranks
    assert found == rank.stages() and found["train"] > rank.weights
    assert planned_stages(load_config(ROOT / "configs" / "grpo_sort_cpu.yaml", ())) == {}
