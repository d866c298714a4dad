"""Weights between Hugging Face and megatron-core in every layout of two ranks: exact, and only what a rank needs."""

from __future__ import annotations

import re
import weakref
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from nemo_rl.errors import ModelFolderError
from nemo_rl.models.hf.files import Box
from nemo_rl.models.hf.folder import ALL_ROWS, ModelWeights, open_weights
from nemo_rl.models.hf.loading import named_weights
from nemo_rl.models.hf.writing import ModelDescription, write_folder
from nemo_rl.models.megatron.architecture import Architecture
from nemo_rl.models.megatron.convert import export_weights, held_shards, load_weights, weight_infos
from nemo_rl.models.megatron.convert_table import table_name, weights_of
from nemo_rl.models.megatron.setup import MegatronModel, build_model, destroy_parallel, initialize_parallel
from tests.helpers.gloo import COLLECTIVE_TIMEOUT_S, run_ranks
from tests.helpers.megatron_models import FAMILIES, forward, hf_model, policy_config, tokens

LOGIT_ERROR = 2e-6
"""Of float32 in another order of summation; logits are about 2."""
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and how two ranks share it; without settings each has the whole."""

    family: str
    megatron: dict[str, object] = field(default_factory=dict)
    changes: dict[str, object] = field(default_factory=dict)
    precision: str = "float32"


CASES = {
    **{family: Case(family=family) for family in FAMILIES},
    "qwen2 tp2": Case(family="qwen2", megatron=TENSOR),
    "qwen3 tp2": Case(family="qwen3", megatron=TENSOR),
    "llama tp2 with one group": Case(family="llama", megatron=TENSOR, changes={"num_key_value_heads": 1}),
    "glm4_moe tp2": Case(family="glm4_moe", megatron=SEQUENCE),
    "qwen3_moe tp2, whole experts": Case(family="qwen3_moe", megatron={**SEQUENCE, "expert_tensor_parallel_size": 1}),
    "qwen3_moe tp2 ep2": Case(family="qwen3_moe", megatron={**SEQUENCE, **EXPERT, "expert_tensor_parallel_size": 1}),
    "qwen3 pp2": Case(family="qwen3", megatron=PIPELINE),
    "glm4_moe pp2, uneven": Case(family="glm4_moe", megatron={**PIPELINE, "num_layers_in_first_pipeline_stage": 1}),
    "mixtral ep2": Case(family="mixtral", megatron=EXPERT),
    "glm4_moe ep2 bf16": Case(family="glm4_moe", megatron=EXPERT, precision="bfloat16"),
}
WITH_LOGITS = [name for name, case in CASES.items() if "pp2" not in name and case.precision == "float32"]
"""Where a plain forward pass ends in logits."""


class RecordingWeights(ModelWeights):
    """Notes what is read."""

    def __init__(self, model: torch.nn.Module, *, where: str) -> None:
        super().__init__(model, where=where)
        self.read: dict[str, int] = {}
        """Rows of each weight, added up."""

    def get(self, name: str, *, rows: slice = ALL_ROWS) -> torch.Tensor:
        weight = super().get(name, rows=rows)
        self.read[name] = self.read.get(name, 0) + weight.shape[0]
        return weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one rank saw of a case."""

    names_differ: Set[str]
    """Between the Hugging Face module, the export and `weight_infos`."""
    order_differs: bool
    changed: list[str]
    """Weights whose bits are not those that were loaded."""
    wrong_kind: list[str]
    """Weights whose shape or dtype is not that of the module, or not as `weight_infos` says."""
    shares_memory: list[str]
    most_alive: int
    """Exported weights in memory at a time, when the caller drops each before it takes the next."""
    strided: list[str]
    logit_error: float
    held: dict[str, set[Box]]
    """Boxes that this rank holds of each exported weight."""
    held_otherwise: list[str]
    """Weights whose boxes have other values than the export."""
    read: dict[str, int]


def _build(case: Case) -> MegatronModel:
    policy = policy_config(precision=case.precision, **case.megatron)
    initialize_parallel(policy, timeout_s=COLLECTIVE_TIMEOUT_S, seed=1)
    config = hf_model(case.family, **case.changes).config
    return build_model(config, policy, device=torch.device("cpu"))


def _outcome(name: str, case: Case) -> Outcome:
    dtype = getattr(torch, case.precision)
    hf = hf_model(case.family, dtype=dtype, **case.changes)
    expected = dict(named_weights(hf))
    source = RecordingWeights(hf, where="memory")
    model = _build(case)
    load_weights(model, source)
    found, given, most_alive = {}, [], 0
    for exported, weight in export_weights(model):
        given.append(weakref.ref(weight))
        most_alive = max(most_alive, sum(earlier() is not None for earlier in given))
        found[exported] = weight.detach()
        del weight
    infos = weight_infos(hf.config, dtype)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.module.parameters(), *model.module.buffers())}
    held: dict[str, set[Box]] = {}
    held_otherwise = []
    for exported, box, values in held_shards(model, "weights"):
        held.setdefault(exported, set()).add(box)
        if not torch.equal(box.of(found[exported], held=Box.whole(tuple(found[exported].shape))), values):
            held_otherwise.append(exported)
    both = expected.keys() & found.keys() & infos.keys()
    return Outcome(
        names_differ=(expected.keys() ^ found.keys()) | (expected.keys() ^ infos.keys()),
        order_differs=list(found) != list(infos),
        changed=[name for name in both if not torch.equal(found[name], expected[name])],
        wrong_kind=[
            name
            for name in both
            if (infos[name].shape, infos[name].dtype) != (found[name].shape, str(found[name].dtype).split(".")[1])
            or (found[name].shape, found[name].dtype) != (expected[name].shape, expected[name].dtype)
        ],
        shares_memory=[name for name in both if found[name].untyped_storage().data_ptr() in own],
        most_alive=most_alive,
        strided=[name for name in both if not found[name].is_contiguous()],
        held=held,
        held_otherwise=held_otherwise,
        logit_error=_logit_error(name, model, hf),
        read=source.read,
    )


def _logit_error(name: str, model: MegatronModel, hf: torch.nn.Module) -> float:
    """Of this rank's part of the vocabulary."""
    if name not in WITH_LOGITS:
        return 0.0
    model.ddp.eval()
    with torch.no_grad():
        expected = hf(tokens(), use_cache=False).logits
        found = forward(model, tokens())
    split = model.config.tensor_model_parallel_size
    return float((found - expected.chunk(split, dim=-1)[dist.get_rank() % split]).abs().max())


def _refusals() -> dict[str, str]:
    """Messages to weights that are not those of the model, which is left as it was."""
    case = Case(family="qwen3", megatron=PIPELINE)
    model = _build(case)
    before = [weight.clone() for weight in model.module.parameters()]
    messages = {}
    for name, other in (
        ("wider", hf_model("qwen3", intermediate_size=64)),
        ("longer", hf_model("qwen3", num_hidden_layers=5)),
        ("shorter", hf_model("qwen3", num_hidden_layers=3)),
        ("other family", hf_model("qwen2")),
    ):
        with pytest.raises(ModelFolderError) as caught:
            load_weights(model, ModelWeights(other, where=f"folder {name}"))
        messages[name] = str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))
    return messages


def _rewrite(rank: int, source: Path, target: Path) -> None:
    """From a folder into two ranks and back to a folder, in small shards."""
    model = _build(CASES["mixtral ep2"])
    config = hf_model("mixtral").config
    load_weights(model, open_weights(source, config))
    exported = export_weights(model)
    if rank == 0:
        described = ModelDescription(config=config, infos=weight_infos(config, torch.float32))
        write_folder(target, described, exported, max_shard_bytes=40_000)
    else:
        assert all(weight.numel() for _, weight in exported)


def _all_cases(rank: int, source: Path, target: Path) -> dict[str, object]:
    outcomes: dict[str, object] = {}
    for name, case in CASES.items():
        outcomes[name] = _outcome(name, case)
        destroy_parallel()
    outcomes["refusals"] = _refusals()
    destroy_parallel()
    _rewrite(rank, source, target)
    destroy_parallel()
    return outcomes


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What two ranks saw and wrote."""

    ranks: list[dict[str, Outcome]]
    refusals: dict[str, str]
    source: Path
    target: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target") / "model"
    hf_model("mixtral").save_pretrained(str(source))
    ranks = run_ranks(2, _all_cases, source, target, timeout_s=120)
    refusals = ranks[1]["refusals"]
    return Job(ranks=ranks, refusals=refusals, source=source, target=target)


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_changes_no_bit(job: Job, name: str) -> None:
    for rank in job.ranks:
        outcome = rank[name]
        assert not outcome.names_differ
        assert not outcome.changed


@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_each_element_of_the_export_as_it_is_exported(job: Job, name: str) -> None:
    """By this a refit from shard to shard takes the parts of megatron-core's weights."""
    shapes = {part.name: part.shape for weight in weights_of(_architecture(name)) for part in weight.parts}
    held: dict[str, set[Box]] = {weight: set() for weight in shapes}
    for rank in job.ranks:
        assert not rank[name].held_otherwise
        for weight, boxes in rank[name].held.items():
            held[weight] |= boxes
    for weight, boxes in held.items():
        assert sum(box.count for box in boxes) == Box.whole(shapes[weight]).count, weight
        assert not any(one.meet(other) for one in boxes for other in boxes if one != other), weight


def _architecture(name: str) -> Architecture:
    case = CASES[name]
    return Architecture.of(hf_model(case.family, **case.changes).config)


@pytest.mark.parametrize("name", CASES)
def test_exports_are_as_announced_and_in_memory_of_their_own(job: Job, name: str) -> None:
    for rank in job.ranks:
        outcome = rank[name]
        assert not outcome.order_differs
        assert not outcome.wrong_kind
        assert not outcome.shares_memory
        # Queries, keys and values are gathered as one.
        assert outcome.most_alive <= 3
        assert not outcome.strided


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_a_loaded_model_has_the_logits_of_hugging_face(job: Job, name: str) -> None:
    assert all(rank[name].logit_error < LOGIT_ERROR for rank in job.ranks)


def layers_read(outcome: Outcome) -> set[int]:
    return {int(match[1]) for name in outcome.read if (match := re.search(r"layers\.(\d+)\.", name))}


def test_a_stage_reads_its_own_layers_only(job: Job) -> None:
    first, last = (rank["glm4_moe pp2, uneven"] for rank in job.ranks)
    assert (layers_read(first), layers_read(last)) == ({0}, {1, 2, 3})
    assert "lm_head.weight" not in first.read
    assert "model.embed_tokens.weight" not in last.read


def test_a_tied_head_is_read_on_the_last_stage_too(job: Job) -> None:
    assert all("model.embed_tokens.weight" in rank["qwen3 pp2"].read for rank in job.ranks)


def test_a_rank_reads_its_own_experts_only(job: Job) -> None:
    rows = [rank["mixtral ep2"].read["model.layers.3.mlp.experts.gate_up_proj"] for rank in job.ranks]
    assert rows == [2, 2]


def test_weights_of_another_model_are_refused_with_what_differs(job: Job) -> None:
    assert re.search(r"folder wider.*expected shape \[48, 32\], got \[64, 32\]", job.refusals["wider"])
    assert re.search(r"folder longer.*weights are unknown \(model\.layers\.4\.", job.refusals["longer"])
    assert re.search(r"folder shorter.*weights are missing \(model\.layers\.3\.", job.refusals["shorter"])
    assert re.search(r"other family.*missing \(model\.layers\.0\.self_attn\.q_norm", job.refusals["other family"])


def test_a_folder_survives_the_way_through_two_ranks(job: Job) -> None:
    assert len(list(job.target.glob("*.safetensors"))) > 2
    loaded, report = AutoModelForCausalLM.from_pretrained(str(job.target), output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        found, expected = loaded(tokens()).logits, hf_model("mixtral")(tokens()).logits
    assert torch.equal(found, expected)


def test_the_modules_of_transformer_engine_have_the_same_names() -> None:
    """They run on GPUs only; these are the names of their parameters."""
    layer = "decoder.layers.1."
    assert table_name(f"{layer}self_attention.linear_qkv.layer_norm_weight", first_layer=2) == (
        "decoder.layers.3.input_layernorm.weight"
    )
    assert table_name(f"{layer}mlp.linear_fc1.layer_norm_weight", first_layer=0) == f"{layer}pre_mlp_layernorm.weight"
    assert table_name(f"{layer}mlp.experts.linear_fc2.weight11", first_layer=0) == (
        f"{layer}mlp.experts.local_experts.11.linear_fc2.weight"
    )
    assert table_name(f"{layer}mlp.linear_fc1.weight", first_layer=0) == f"{layer}mlp.linear_fc1.weight"
