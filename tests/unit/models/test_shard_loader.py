"""What vLLM's loaders take of each weight is recorded, and parts that are put there are what whole weights make."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from nemo_rl.models.generation.interfaces import EngineSpec
from nemo_rl.models.hf.files import Box
from nemo_rl.models.weight_sync.buckets import WeightSlot, match_slots
from nemo_rl.models.weight_sync.receipt.fingerprint import fingerprints
from nemo_rl.models.weight_sync.shard_loader import joined_prints
from nemo_rl.models.weight_sync.shard_plan import Boxes, plan_shards
from tests.helpers.engine_process import NO_VLLM, has_vllm, vllm_policy
from tests.helpers.gloo import run_ranks
from tests.helpers.model_families import VLLM_SIZES

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.skipif(not has_vllm(), reason=NO_VLLM)]

VOCABULARY = 330
SIZES = {**VLLM_SIZES, "vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2}
"""A vocabulary that is padded."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
MODELS = {
    "dense": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=2, tie_word_embeddings=True)),
    "one head and biases": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **{k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_key_value_heads": 1},
            num_hidden_layers=2,
            tie_word_embeddings=False,
        )
    ),
    "experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **EXPERTS, num_hidden_layers=2, tie_word_embeddings=False)
    ),
}
CASES = {"divided experts": ("experts", True), **{name: (name, False) for name in reversed(MODELS)}}
"""Model, and whether ranks divide the experts; those with experts first, for vLLM makes its groups once."""
GATE = "model.layers.0.mlp.gate_proj.weight"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
Weights = dict[str, torch.Tensor]


@dataclass
class Rank:
    """One rank of a vLLM model without its engine, and how it is refitted."""

    model: torch.nn.Module
    slots: tuple[WeightSlot, ...]
    loader: object

    @classmethod
    def of(cls, rank: int, folder: str, *, experts: bool) -> Rank:
        """(collective) Build the model of this rank."""
        policy = vllm_policy(Path(folder), generation={"vllm_cfg": {"tensor_parallel_size": 2}})
        spec = EngineSpec(policy=policy, weight_version=-1)
        from nemo_rl.models.generation.vllm.start import engine_arguments, prepare_process

        prepare_process(spec)
        import vllm
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import (
            init_distributed_environment,
            initialize_model_parallel,
            model_parallel_is_initialized,
        )
        from vllm.model_executor.model_loader import get_model

        from nemo_rl.models.generation.vllm.extension import (
            RankRefit,
            RefitExtension,
            expected_weights,
            remove_names,
        )

        known = {key: value for key, value in engine_arguments(spec).items() if key != "logprobs_mode"}
        config = vllm.EngineArgs(**{**known, "enable_expert_parallel": experts}).create_engine_config()
        # By it ranks find the memory that they share, whose name goes when all of them have it.
        os.environ.setdefault("VLLM_DIST_IDENT", f"shards-{os.getppid()}-{Path(folder).parent.name}")
        with set_current_vllm_config(config):
            if not model_parallel_is_initialized():
                init_distributed_environment(2, rank, "env://", rank, "gloo")
                initialize_model_parallel(2)
                remove_names()
            model = get_model(vllm_config=config)
        extension = RefitExtension()
        extension.vllm_config, extension.rank, extension.device = config, rank, torch.device("cpu")
        extension.model_runner = SimpleNamespace(
            get_model=lambda: model, model_config=config.model_config, reset_encoder_cache=lambda: None
        )
        expected = expected_weights(folder, precision="float32")
        state = expected.state_dict(keep_vars=True)
        names = dict.fromkeys(id(weight) for weight in state.values())
        offered = {name: tuple(weight.shape) for name, weight in state.items() if names.pop(id(weight), 1) is None}
        extension.rank_refit = RankRefit(expected, extension, rank=rank, device=torch.device("cpu"))
        return cls(model, match_slots(offered, state)[0], extension)


def _weights(rank: Rank, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {slot.name: torch.randn(slot.shape, generator=generator) for slot in rank.slots}


def _held(rank: Rank) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in rank.model.state_dict().items()}


def _whole_refit(rank: Rank, weights: Weights) -> None:
    refit = rank.loader.rank_refit
    refit.begin_weights()
    for name, weight in weights.items():
        refit.take_weight(name, weight)
    refit.finish_weights()


def _shard_refit(rank: Rank, plan_boxes: Boxes, weights: Weights) -> None:
    """Bring only what is taken, in pieces as two policy ranks would send them."""
    refit, whole = rank.loader.rank_refit, [Box.whole(slot.shape) for slot in rank.slots]
    halves = [
        [(box.along(0, *((0, box.size[0] // 2), (box.size[0] // 2, -(-box.size[0] // 2)))[place]),) for box in whole]
        for place in range(2)
    ]
    plan = plan_shards(rank.slots, halves, _both_ranks(plan_boxes), bucket_bytes=3000)
    refit.begin_weights()
    refit._shards = refit._recorded
    refit._shards.begin()
    refit._taken = {refit._first[name] for name in refit._shards.left_out}
    for segments in plan.of(2 + dist.get_rank()).rounds:
        for segment in segments:
            for piece in segment.pieces:
                slot = rank.slots[piece.slot]
                values = piece.box.of(weights[slot.name], held=Box.whole(slot.shape)).clone()
                refit._shards.place(slot, piece.box, values)
                values.fill_(float("nan"))
    refit.finish_weights()


def _both_ranks(own: Boxes) -> dict[int, Boxes]:
    """(collective) Return what both ranks take."""
    found: list[Boxes] = [None, None]  # type: ignore[list-item]
    dist.all_gather_object(found, own)
    return {2 + place: boxes for place, boxes in enumerate(found)}


def _all_cases(rank: int, folder: str) -> dict[str, dict[str, object]]:
    """Build one model after the other: to import vLLM takes longest."""
    return {name: _one_case(rank, f"{folder}/{model}", experts) for name, (model, experts) in CASES.items()}


def _one_case(rank: int, folder: str, experts: bool) -> dict[str, object]:
    torch.manual_seed(0)
    built = Rank.of(rank, folder, experts=experts)
    first, second = _weights(built, 1), _weights(built, 2)
    _whole_refit(built, second)
    expected = _held(built)
    _whole_refit(built, first)
    before = _held(built)
    boxes = built.loader.rank_refit.record_parts(built.slots, "weights")
    seen: dict[str, object] = {"untouched": _same(before, _held(built))}
    _shard_refit(built, boxes, second)
    seen["equal"] = _same(expected, _held(built))
    seen["received"] = sum(box.count for own in boxes for box in own)
    seen["shard"] = _shard(built)
    prints = list[object]([None, None])
    dist.all_gather_object(prints, built.loader.rank_refit.part_prints())
    seen["proved"] = joined_prints(prints, built.slots) == fingerprints(second.items())  # type: ignore[arg-type]
    for name in (GATE, FUSED, "model.embed_tokens.weight"):
        if name in second:
            seen[name] = _fault_is_found(built, boxes, second, name)
    return seen


def _fault_is_found(rank: Rank, boxes: Boxes, weights: Weights, name: str) -> bool:
    """A refit with another slice in the place of one: halves of gate and up, an expert of before, rows off by one."""
    whole = weights[name]
    wrong = whole.roll(1, 0) if name.startswith("model.embed") else whole.clone()
    if name == GATE:
        wrong = weights[GATE.replace("gate", "up")]
    elif name == FUSED:
        wrong[3] = _weights(rank, 1)[name][3]
    _shard_refit(rank, boxes, {**weights, name: wrong})
    prints = list[object]([None, None])
    dist.all_gather_object(prints, rank.loader.rank_refit.part_prints())
    found = joined_prints(prints, rank.slots)  # type: ignore[arg-type]
    expected = fingerprints(weights.items())
    return {each for each in expected if expected[each] != found[each]} == {name}


def _same(one: Weights, other: Weights) -> list[str]:
    return [name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name])]


def _shard(rank: Rank) -> int:
    """Return the elements of this rank's parameters as they are loaded, a tied head not again, without the padding of
    the vocabulary. vLLM packs some of them, and then they are gone."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    tied = {id(module) for module in rank.model.modules() if getattr(module, "weight", None) is _table(rank)}
    found = 0
    for name, module in rank.model.named_modules():
        loaded = [*get_layerwise_info(module).restore_metadata[0].values()]
        if (bias := module._parameters.get("bias")) is not None:
            loaded.append(bias)
        is_vocabulary = "embed_tokens" in name or "lm_head" in name
        if "lm_head" in name and len(tied) > 1:
            continue
        for weight in loaded:
            rows = len(weight)
            found += (
                weight.numel() // rows * (min(rows, VOCABULARY - rows * dist.get_rank()) if is_vocabulary else rows)
            )
    return found


def _table(rank: Rank) -> torch.Tensor:
    return rank.model.get_parameter("model.embed_tokens.weight")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, object]]]:
    folder = tmp_path_factory.mktemp("shards")
    for name, build in MODELS.items():
        build().save_pretrained(str(folder / name))
    return run_ranks(2, _all_cases, str(folder))  # type: ignore[return-value]


@pytest.mark.parametrize("case", CASES)
def test_parts_make_the_model_that_whole_weights_make(ranks: list[dict[str, dict[str, object]]], case: str) -> None:
    for of_rank in ranks:
        seen = dict(of_rank[case])
        assert seen.pop("untouched") == [] and seen.pop("equal") == [], seen
        assert seen.pop("received") <= 1.05 * seen.pop("shard")  # type: ignore[operator]
        assert all(seen.values()), seen
