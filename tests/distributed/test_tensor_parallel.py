"""Collectives with gradients, logits split over the vocabulary, and layouts that a model cannot run in: two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import FalconConfig, FalconForCausalLM

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig, LoraConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import ParallelGroups, copy_to, gather_along, reduce_from, scatter_along
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.errors import ConfigError
from nemo_rl.models.head import logits as head_logits
from nemo_rl.models.head.logits import KeptSets, LazyLogits
from nemo_rl.models.head.logprobs import Sampling, TopTokens, VocabShard, WantedLines, token_lines, token_logprobs
from tests.helpers.gloo import COLLECTIVE_TIMEOUT_S, run_ranks
from tests.helpers.model_families import FAMILY_SIZES, write_family
from tests.helpers.tiny_model import tiny_batch, tiny_policy, tiny_worker

RANKS = 2
SAMPLINGS = {
    "plain": Sampling(temperature=0.7),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(temperature=1.3, top_p=0.6),
}

RECORDED = "recorded"
LOSS = PolicyLoss(config=LossConfig())
MLP_PLAN = {
    **{f"model.layers.*.mlp.{name}": "colwise" for name in ("gate_proj", "up_proj")},
    "model.layers.*.mlp.down_proj": "rowwise",
}


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _adjoints(rank: int) -> dict[str, float]:
    """For each function: the error of its gradient against that of the same computation on one rank."""
    weight = numbers(3, 4, seed=9)
    group = dist.group.WORLD
    errors = {}
    # Every rank holds the same x and uses it for its own part of the loss.
    x = numbers(3, 4, seed=1).requires_grad_()
    (copy_to(x, group) * weight * (rank + 1)).sum().backward()
    errors["copy_to"] = float((x.grad - weight * 3).abs().max())
    # The sum of the ranks' parts is used by all alike.
    x = numbers(3, 4, seed=rank).requires_grad_()
    (reduce_from(x, group).square() * weight).sum().backward()
    total = numbers(3, 4, seed=0) + numbers(3, 4, seed=1)
    errors["reduce_from"] = float((x.grad - 2 * total * weight).abs().max())
    # All values side by side, each rank using the whole for its own part.
    x = numbers(3, 2, seed=rank).requires_grad_()
    whole = gather_along(x, group, dim=1)
    (whole * weight * (rank + 1)).sum().backward()
    expected = torch.cat([numbers(3, 2, seed=0), numbers(3, 2, seed=1)], dim=1)
    errors["gather_along"] = float((x.grad - 3 * weight[:, 2 * rank : 2 * rank + 2]).abs().max())
    errors["gather_along's value"] = float((whole - expected).abs().max())
    # Each rank keeps its slice of the sum, and the loss is the sum of what the ranks make of their slices.
    x = numbers(3, 4, seed=rank).requires_grad_()
    mine = scatter_along(x, group, dim=1)
    (mine * weight[:, 2 * rank : 2 * rank + 2] * (rank + 1)).sum().backward()
    scaled = torch.cat([weight[:, :2], weight[:, 2:] * 2], dim=1)
    errors["scatter_along"] = float((x.grad - scaled).abs().max())
    errors["scatter_along's value"] = float((mine - total[:, 2 * rank : 2 * rank + 2]).abs().max())
    return errors


def _split_logprobs(rank: int) -> dict[str, tuple[float, float]]:
    """Errors of log-probabilities, entropies and gradients against whole logits, across chunk borders."""
    head_logits.CHUNK_ELEMENTS["cpu"] = 64
    hidden, weight = numbers(11, 6, seed=3).float(), numbers(20, 6, seed=6).float() * 2
    logits = hidden @ weight.T
    targets = torch.randint(0, 20, (11,), generator=torch.Generator().manual_seed(4))
    ids = torch.rand(11, 20, generator=torch.Generator().manual_seed(7)).argsort(-1)[:, :3]
    lines = WantedLines(entropy=True, unfiltered=True, ids_MK=ids)
    out = numbers(7, 11, seed=5).float()
    errors = {}
    # Sets that lie on both ranks, and such as one rank has nothing of.
    sizes = torch.arange(11) % 3 + 1
    others = (targets[:, None] + torch.tensor([1, 10])) % 20
    tokens = torch.cat([torch.cat([targets[i : i + 1], others[i, : sizes[i] - 1]]) for i in range(11)])
    # Of the last one these are what was dropped, but for the token itself.
    place, is_dropped = torch.arange(11).repeat_interleave(sizes), torch.arange(11) == 10
    listed = ~is_dropped[place] | (tokens != targets[place])
    recorded = KeptSets(place_E=place[listed], token_E=tokens[listed], is_dropped_m=is_dropped)
    for name, sampling in {**SAMPLINGS, RECORDED: SAMPLINGS["top_p"]}.items():
        kept = recorded if name == RECORDED else None
        whole = logits.clone().requires_grad_()
        expected = token_lines(whole, targets, sampling=sampling, kept=kept, lines=lines)
        (expected * out).sum().backward()
        mine = logits[:, rank * 10 : rank * 10 + 10].clone().requires_grad_()
        shard = VocabShard(group=dist.group.WORLD, first=rank * 10)
        found = token_lines(mine, targets, sampling=sampling, shard=shard, kept=kept, lines=lines)
        assert torch.equal(found[0], token_logprobs(mine, targets, sampling=sampling, shard=shard, kept=kept))
        squares = [
            token_lines(part, targets, sampling=sampling, shard=at, kept=kept, lines=WantedLines(squares=True))
            for part, at in ((mine.detach(), shard), (logits, None))
        ]
        torch.testing.assert_close(squares[0], squares[1], rtol=1e-5, atol=1e-6)
        assert float(squares[0][1].min()) > 1 / 20, "some of the vocabulary is likelier"
        (found * out).sum().backward()
        gradient = whole.grad[:, rank * 10 : rank * 10 + 10]
        errors[name] = (float((found - expected).detach().abs().max()), float((mine.grad - gradient).abs().max()))
        # The same from hidden states that both ranks have, and this rank's rows of the head.
        states, rows = hidden.clone().requires_grad_(), weight[rank * 10 : rank * 10 + 10].clone().requires_grad_()
        lazy = LazyLogits(hidden_MD=copy_to(states, dist.group.WORLD), weight_VD=rows)
        fused = token_lines(lazy, targets, sampling=sampling, shard=shard, kept=kept, lines=lines)
        (fused * out).sum().backward()
        worst = max(
            float((states.grad - whole.grad @ weight).abs().max()), float((rows.grad - gradient.T @ hidden).abs().max())
        )
        errors[f"{name}, fused"] = (float((fused - expected).detach().abs().max()), worst)
    return errors


def _refusals(rank: int, folders: dict[str, Path]) -> dict[str, str]:
    found = {}
    for name, (folder, changes) in {
        "tied": ("qwen3", {"tensor_parallel_size": 2, "custom_parallel_plan": {"lm_head": "colwise"}}),
        "own": ("own", {"context_parallel_size": 2}),
    }.items():
        with pytest.raises(ConfigError) as caught:
            tiny_worker(tiny_policy(folders[folder], dtensor_cfg=DTensorConfig(**changes)), rank=rank, world_size=2)
        found[name] = str(caught.value)
    return found


def _custom_plan(rank: int, folder: Path) -> float:
    """A user's plan for the MLPs alone gives the same log-probabilities as no plan."""
    batch = _rows()
    values = []
    for sizes in (DTensorConfig(), DTensorConfig(tensor_parallel_size=2, custom_parallel_plan=MLP_PLAN)):
        worker = tiny_worker(tiny_policy(folder, dtensor_cfg=sizes), rank=rank, world_size=2)
        values.append(worker.get_logprobs(batch))
        values.append(worker.get_topk_logits(batch, k=3)[0])
        worker.shutdown()
    return max(float((values[i] - values[i + 2]).abs().max()) for i in range(2))


def _adapters_of_a_custom_plan(rank: int, folder: Path) -> float:
    """The plan leaves attention whole on every rank; adapters of both kinds of layers train as without a plan."""
    lora, found = LoraConfig(enabled=True, rank=4), []
    for sizes in (DTensorConfig(), DTensorConfig(tensor_parallel_size=2, custom_parallel_plan=MLP_PLAN)):
        policy = tiny_policy(folder, dtensor_cfg=sizes, lora=lora)
        worker = tiny_worker(policy, rank=rank, world_size=2)
        # Every data-parallel rank has the same rows, so that gradients are those of one.
        norms = [worker.train(tiny_batch(4), LOSS, gbs=4 * worker.layout.dp).grad_norm[0] for _ in range(3)]
        trained = torch.cat([weight.flatten() for _, weight in worker.engine.full_adapter()])
        found.append(torch.cat([trained, torch.tensor(norms)]))
        worker.shutdown()
    return float((found[0] - found[1]).abs().max())


def _top_k(rank: int, folder: Path) -> float:
    """The largest logits, and log-probabilities, are the same where a layout splits vocabulary and sequences."""
    batch, values = _rows(), []
    for sizes in (
        DTensorConfig(),
        DTensorConfig(tensor_parallel_size=2, sequence_parallel=True),
        DTensorConfig(context_parallel_size=2),
    ):
        worker = tiny_worker(tiny_policy(folder, dtensor_cfg=sizes), rank=rank, world_size=2)
        logits, logprobs = worker.get_topk_logits(batch, k=3)[0], worker.get_topk_logprobs(batch, TopTokens(k=3))[1]
        values.append(torch.cat([logits, logprobs], dim=-1))
        worker.shutdown()
    return max(float((value - values[0]).abs().max()) for value in values)


def _noise(rank: int, folder: Path) -> dict[str, float]:
    """The first random number after a worker has started."""
    found = {}
    for name, sizes in (("data", DTensorConfig()), ("tensor", DTensorConfig(tensor_parallel_size=2))):
        worker = tiny_worker(tiny_policy(folder, dtensor_cfg=sizes), rank=rank, world_size=2)
        found[name] = float(torch.rand(1))
        worker.shutdown()
    return found


def _rows() -> BatchedDataDict:
    batch = tiny_batch(4)
    del batch["token_mask"]
    return batch


def _deadlines(rank: int) -> set[float]:
    """Of every group of a layout, in seconds."""
    groups = ParallelGroups.build(ParallelLayout.of(2, tp=2), rank=rank, device=torch.device("cpu"))
    other = ParallelGroups.build(ParallelLayout.of(2, cp=2), rank=rank, device=torch.device("cpu"))
    assert groups.tensor_mesh is not None and other.context is not None
    found = [groups.tensor_mesh.get_group(), groups.fsdp_mesh.get_group(), other.context]
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in found}


def two_ranks(rank: int, folders: dict[str, Path]) -> dict[str, object]:
    return {
        "adjoints": _adjoints(rank),
        "deadlines": _deadlines(rank),
        "logprobs": _split_logprobs(rank),
        "refusals": _refusals(rank, folders),
        "custom": _custom_plan(rank, folders["qwen3"]),
        "custom adapters": _adapters_of_a_custom_plan(rank, folders["qwen3"]),
        "top_k": _top_k(rank, folders["qwen3"]),
        "noise": _noise(rank, folders["qwen3"]),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    found = {"qwen3": write_family(root / "qwen3", "qwen3"), "own": write_family(root / "own", "qwen3")}
    FalconForCausalLM(FalconConfig(**FAMILY_SIZES, alibi=False)).save_pretrained(str(found["own"]))
    return found


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path]) -> list[dict[str, object]]:
    return run_ranks(RANKS, two_ranks, folders, timeout_s=180)  # type: ignore[return-value]


@pytest.mark.slow
def test_every_collective_has_the_gradient_of_its_use(outcomes) -> None:
    for outcome in outcomes:
        assert max(outcome["adjoints"].values()) < 1e-12, outcome["adjoints"]


@pytest.mark.slow
def test_every_group_has_the_deadline_of_the_job(outcomes) -> None:
    for outcome in outcomes:
        assert outcome["deadlines"] == {COLLECTIVE_TIMEOUT_S}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [*SAMPLINGS, RECORDED])
def test_split_logits_give_whole_logprobs(sampling: str, outcomes) -> None:
    for outcome in outcomes:
        for name in (sampling, f"{sampling}, fused"):
            value, gradient = outcome["logprobs"][name]
            assert value < 1e-5 and gradient < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tied", "are one tensor, but are split as"),
        ("own", "'falcon' brings its own attention, which neither packing nor context"),
    ],
)
def test_what_a_model_cannot_do_is_refused_on_every_rank(name: str, text: str, outcomes) -> None:
    for outcome in outcomes:
        assert text in outcome["refusals"][name]


@pytest.mark.slow
def test_a_users_plan_gives_the_same_numbers(outcomes) -> None:
    for outcome in outcomes:
        assert outcome["custom"] < 2e-5
        assert outcome["custom adapters"] < 2e-5


@pytest.mark.slow
def test_tensor_parallel_ranks_drop_the_same_activations(outcomes) -> None:
    first, second = (outcome["noise"] for outcome in outcomes)
    assert first["tensor"] == second["tensor"] and first["data"] != second["data"]


@pytest.mark.slow
def test_the_largest_logits_do_not_depend_on_the_layout(outcomes) -> None:
    for outcome in outcomes:
        assert outcome["top_k"] < 2e-5


def test_padded_rows_keep_an_attention_that_cannot_be_replaced(folders: dict[str, Path]) -> None:
    worker = tiny_worker(tiny_policy(folders["own"]))
    assert worker.get_logprobs(_rows()).isfinite().all()
    worker.shutdown()
