"""Rollouts with top-p: the worker scores under the sets that the embedded engine kept, in every layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.generation import GenerationConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig, SequencePackingConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.payload import build_columns
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.head.logits import SUPPORT
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.gloo import run_ranks
from tests.helpers.hf_reference import global_scale, hf_logprobs
from tests.helpers.parallel_layouts import Case, policy_of
from tests.helpers.tiny_model import tiny_model, tiny_policy, tiny_worker, write_tiny_folder

TOP_P = 0.8
GENERATION = GenerationConfig(top_p=TOP_P, record_support=True)
KL_PENALTY = 0.2
LOSS = PolicyLoss(config=LossConfig(reference_policy_kl_penalty=KL_PENALTY))
PROMPTS = tuple((7 + 3 * i, 40 + i, 90 - i, *range(100, 100 + i)) for i in (3, 1, 2, 0))
CHANGED = 7
"""Seed of weights that are not the engine's."""


def rollout() -> BatchedDataDict:
    """Sixteen rows from the weights of seed 0, sampled in two requests and batches of different sizes."""
    sampling = SamplingParams(temperature=1.0, top_p=TOP_P, max_new_tokens=12, stop_token_ids=(2,))
    engine = TorchEngine(tiny_model(), tokenizer=None, max_total_length=64, weight_version=0, max_batch_size=5)
    outputs = [
        engine.generate(
            GenerationRequest(
                prompt_ids=PROMPTS[part : part + 2],
                seeds=tuple(range(8 * part, 8 * part + 8)),
                sampling=sampling,
                with_support=True,
            )
        )
        for part in (0, 2)
    ]
    columns = build_columns(PROMPTS, GenerationOutput.joined(outputs), group_size=4, pad_token_id=0)
    columns[SUPPORT] = columns.tensor(SUPPORT).to_padded_tensor(0)
    columns["prev_logprobs"] = columns.tensor("generation_logprobs")
    # Near the model's own, so that no clamp has a part in it.
    whole = hf_logprobs(tiny_model(seed=CHANGED), columns).detach()
    columns["reference_policy_logprobs"] = whole + 0.3 * torch.linspace(-1, 1, whole.shape[1])
    columns["advantages"] = torch.linspace(-1, 1, columns.size)[:, None].expand_as(columns.tensor("input_ids"))
    return columns


def policy(folder: Path, **changes: object) -> PolicyConfig:
    return tiny_policy(folder, **{"generation": GENERATION, "train_global_batch_size": 16, **changes})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {seed: write_tiny_folder(tmp_path_factory.mktemp("model"), seed=seed) for seed in (0, CHANGED)}


@pytest.fixture(scope="module")
def batch() -> BatchedDataDict:
    return rollout()


def measured(worker: PolicyWorker, batch: BatchedDataDict) -> tuple[np.ndarray, float, float]:
    """Log-probabilities, here and of the reference, then the loss and the norm of the gradient of one training pass."""
    logprobs = torch.stack([worker.get_logprobs(batch), worker.get_reference_policy_logprobs(batch)])
    result = worker.train(batch, LOSS)
    return logprobs.numpy(), result.loss[0], result.grad_norm[0]


def leb128(column: list[int]) -> Iterator[int]:
    number, shift = 0, 0
    for byte in column:
        number, shift = number | (byte & 127) << shift, shift + 7
        if byte < 128:
            yield number
            number, shift = 0, 0


def slow(batch: BatchedDataDict, model: PreTrainedModel) -> torch.Tensor:
    """Differentiable, row by row and token by token, from the engine's sets as they lie in the column."""
    found = torch.zeros(batch.tensor("input_ids").shape, dtype=model.dtype)
    for row in range(batch.size):
        ids = batch.tensor("input_ids")[row].long()
        logits = model(input_ids=ids[None, : int(batch.tensor("input_lengths")[row])]).logits[0]
        numbers = iter(leb128(batch.tensor(SUPPORT)[row].tolist()))
        for place in batch.tensor("token_mask")[row].nonzero()[:, 0].tolist():
            kept, last = [int(ids[place])], -1
            while (number := next(numbers)) > 2:
                last += number - 2
                kept.append(last)
            assert number == 1 and len(set(kept)) == len(kept)
            found[row, place] = logits[place - 1, ids[place]] - logits[place - 1, kept].logsumexp(0)
    return found


@pytest.fixture(scope="module")
def expected(batch: BatchedDataDict) -> tuple[np.ndarray, float, float]:
    """As `measured`, of one Hugging Face model in float64; the KL is that of whole distributions."""
    model = tiny_model(seed=CHANGED).double()
    logprobs, mask = slow(batch, model), batch.tensor("token_mask")
    whole = torch.where(mask, hf_logprobs(model, batch), 0.0)
    without_kl = PolicyLoss(config=LossConfig(reference_policy_kl_penalty=0))
    loss = without_kl(logprobs, batch, scale=global_scale(batch)).loss
    x = (batch.tensor("reference_policy_logprobs") - whole)[mask]
    loss = loss + KL_PENALTY * (x.exp() - 1 - x).mean()
    loss.backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
    return torch.stack([logprobs, whole]).detach().numpy(), loss.item(), norm.item()


@pytest.mark.parametrize("packed", [False, True])
def test_the_mean_ratio_of_unchanged_weights_is_one(packed: bool, folders, batch) -> None:
    worker = tiny_worker(policy(folders[0], sequence_packing=SequencePackingConfig(enabled=packed)))
    mask = batch.tensor("token_mask")
    gap = (worker.get_logprobs(batch) - batch.tensor("generation_logprobs"))[mask]
    result = worker.train(batch, LOSS, eval_mode=True)
    worker.shutdown()
    assert float(gap.exp().mean()) == pytest.approx(1, abs=0.002)
    ratios = [part["probs_ratio"] for part in result.metrics]
    mean = sum(part.total for part in ratios) / sum(part.weight for part in ratios)
    assert mean == pytest.approx(1, abs=0.002)
    # The model's own distribution has another mean: what the sets are for is measured here.
    model_own = tiny_worker(tiny_policy(folders[0], train_global_batch_size=16))
    unfiltered = BatchedDataDict({name: column for name, column in batch.items() if name != SUPPORT})
    biased = (model_own.get_logprobs(unfiltered) - batch.tensor("generation_logprobs"))[mask].exp().mean()
    model_own.shutdown()
    assert float(biased) < 0.95


def test_other_weights_are_scored_under_the_sets_of_the_engine(folders, batch, expected) -> None:
    worker = tiny_worker(policy(folders[CHANGED]), keep_reference=True)
    own_sets = worker.get_logprobs(BatchedDataDict({n: c for n, c in batch.items() if n != SUPPORT}))
    found = measured(worker, batch)
    worker.shutdown()
    assert_equal(found, expected)
    assert np.abs(found[0][0] - own_sets.numpy()).max() > 0.1


@pytest.mark.parametrize("with_sets", [True, False])
def test_the_kl_compares_whole_distributions(with_sets: bool, folders, batch) -> None:
    generation = GENERATION if with_sets else GenerationConfig(top_p=TOP_P)
    columns = batch if with_sets else BatchedDataDict({n: c for n, c in batch.items() if n != SUPPORT})
    worker = tiny_worker(policy(folders[CHANGED], generation=generation))
    metrics = worker.train(columns, LOSS, eval_mode=True).metrics
    worker.shutdown()
    whole = hf_logprobs(tiny_model(seed=CHANGED).double(), batch).detach()
    x = (batch.tensor("reference_policy_logprobs") - whole)[batch.tensor("token_mask")]
    parts = [part["reference_kl"] for part in metrics]
    found = sum(part.total for part in parts) / sum(part.weight for part in parts)
    assert found == pytest.approx(float((x.exp() - 1 - x).mean()), rel=1e-4)


def assert_equal(found: tuple[np.ndarray, float, float], expected: tuple[np.ndarray, float, float]) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-4)
    assert found[1:] == pytest.approx(expected[1:], rel=1e-4)


Megatron, DTensor = partial(Case, family="tiny", engine="megatron"), partial(Case, family="tiny")
PADDED = {"batching": "padded"}
ONE = (Megatron(), Megatron(**PADDED))
TWO = (
    DTensor(tp=2, **PADDED),
    DTensor(cp=2),
    Megatron(tp=2, sp=True),
    Megatron(tp=2, **PADDED),
    Megatron(cp=2),
    Megatron(pp=2, **PADDED),
)
FOUR = (DTensor(tp=2, cp=2), Megatron(tp=2, cp=2, sp=True), Megatron(tp=2, pp=2, sp=True), Megatron(cp=2, pp=2))


def _layouts(rank: int, world_size: int, cases: Sequence[Case], folder: Path, batch: BatchedDataDict) -> list[object]:
    """Of each case what this rank has seen; None in front of the last stage of a pipeline."""
    found: list[object] = []
    for case in cases:
        config = policy_of(case, folder).model_copy(
            update={
                "generation": GENERATION,
                "train_global_batch_size": batch.size,
                "sequence_packing": SequencePackingConfig(enabled=case.batching == "packed"),
            }
        )
        worker = tiny_worker(config, rank=rank, world_size=world_size, keep_reference=True)
        outcome = measured(worker, batch)
        worker.shutdown()
        is_last_stage = rank // (case.tp * case.cp) == case.pp - 1
        found.append(outcome if is_last_stage else None)
    return found


@pytest.mark.parametrize("cases", [pytest.param(TWO, id="two"), pytest.param(FOUR, id="four")])
def test_every_layout_of_both_workers_has_the_same_numbers(cases, folders, batch, expected) -> None:
    ranks = cases[0].tp * cases[0].cp * cases[0].pp
    outcomes = run_ranks(ranks, _layouts, ranks, cases, folders[CHANGED], batch)
    for number, case in enumerate(cases):
        seen = [rank[number] for rank in outcomes if rank[number] is not None]
        assert len(seen) == ranks // case.pp
        for outcome in seen:
            assert_equal(outcome, expected)


@pytest.mark.parametrize("case", ONE, ids=str)
def test_one_megatron_rank_has_the_same_numbers(case, folders, batch, expected) -> None:
    [outcome] = _layouts(0, 1, [case], folders[CHANGED], batch)
    assert_equal(outcome, expected)
