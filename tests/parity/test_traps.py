"""Calls that are wrong without saying so: that each trap is there, and that the workers do not fall into it.

The traps of several Megatron ranks (weights without marks, experts without marks, the weight of the balance) are
planted faults of `test_megatron_layouts`, where their ranks run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl.config.backends import DTensorConfig
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.models.dtensor import parallelize
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.hf_reference import hf_logprobs
from tests.helpers.megatron_layouts import run_case
from tests.helpers.megatron_models import hf_model
from tests.helpers.model_families import FAMILY_SIZES, write_with_tokenizer
from tests.helpers.parallel_layouts import Case, layout_batch, reference
from tests.helpers.tiny_model import tiny_policy, tiny_worker

pytestmark = pytest.mark.slow

TINY = {"vocab_size": FAMILY_SIZES["vocab_size"], "num_hidden_layers": 2}
ROUNDING, LEAK = 5e-6, 0.05
"""Of logits and log-probabilities of about 3 and 6 in float32; the least that a leak changes."""
LENGTHS = (9, 5, 12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trap:
    """A call for several sequences in one row whose tokens see other sequences."""

    attention: str
    mask: str | None = None
    use_cache: bool = False

    def arguments(self, position_ids: torch.Tensor) -> dict[str, object]:
        return {"attention_mask": mask_of(self.mask, position_ids), "use_cache": self.use_cache}


TRAPS = {
    "a cache, which is the default": Trap(attention="sdpa", use_cache=True),
    "a mask of ones": Trap(attention="sdpa", mask="ones"),
    "a boolean mask in eager attention": Trap(attention="eager", mask="boolean"),
}
SOUND = {
    "no mask and no cache": Trap(attention="sdpa"),
    "no mask and no cache in eager attention": Trap(attention="eager"),
    "a boolean mask": Trap(attention="sdpa", mask="boolean"),
    "an additive mask in eager attention": Trap(attention="eager", mask="additive"),
}


def mask_of(kind: str | None, position_ids: torch.Tensor) -> torch.Tensor | None:
    """Of a row whose positions restart with every sequence."""
    if kind is None:
        return None
    if kind == "ones":
        return torch.ones_like(position_ids)
    sequence_S = (position_ids[0] == 0).cumsum(0)
    sees_SS = (sequence_S[:, None] == sequence_S[None, :]).tril()
    if kind == "additive":
        return torch.zeros(sees_SS.shape).masked_fill(~sees_SS, float("-inf"))[None, None]
    return sees_SS[None, None]


def packed_error(model: PreTrainedModel, call: Trap) -> float:
    """Largest difference between the logits of one row and those of the sequences alone."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(3, model.config.vocab_size, (1, length), generator=generator) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    model.set_attn_implementation(call.attention)
    with torch.no_grad():
        alone = torch.cat([model(sequence, use_cache=False).logits for sequence in sequences], dim=1)
        row = model(torch.cat(sequences, dim=1), position_ids=positions, **call.arguments(positions)).logits
    return float((row - alone).abs().max())


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return hf_model("qwen3", **TINY)


@pytest.mark.parametrize("name", TRAPS)
def test_hugging_face_mixes_packed_sequences(name: str, model: PreTrainedModel) -> None:
    assert packed_error(model, TRAPS[name]) > LEAK


@pytest.mark.parametrize("name", SOUND)
def test_hugging_face_keeps_packed_sequences_apart(name: str, model: PreTrainedModel) -> None:
    assert packed_error(model, SOUND[name]) < ROUNDING


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_with_tokenizer(tmp_path_factory.mktemp("qwen3"), hf_model("qwen3", **TINY))


@contextmanager
def dtensor_worker(folder: Path, *, attention: str | None) -> Iterator[PolicyWorker]:
    """A worker with its own attention, or with one of Hugging Face's as for models that bring another."""
    config = tiny_policy(folder, dtensor_cfg=DTensorConfig())
    problem = None if attention is None else "kept"
    with patch.object(parallelize, "attention_problem", lambda _: problem):
        worker = tiny_worker(config)
    if attention is not None:
        worker.engine.model.hf.set_attn_implementation(attention)
    try:
        yield worker
    finally:
        worker.shutdown()


def worker_error(worker: PolicyWorker, expected: torch.Tensor) -> float:
    """Of the log-probabilities of all tokens, three rows to a pass."""
    batch = layout_batch()
    del batch["token_mask"]
    plan = PackPlan(microbatches=(((0, 1, 2), (3, 4, 5), (6, 7)),), steps=(3,), pad_to=24, packed=True)
    return float((worker.get_logprobs(batch, plan=plan) - expected).abs().max())


@contextmanager
def unguarded(worker: PolicyWorker, trap: Trap) -> Iterator[None]:
    """The model is called as the trap says, whatever the worker says."""
    honest = worker.engine.model.hf.forward

    def forward(*, position_ids: torch.Tensor, **given: object) -> object:
        return honest(position_ids=position_ids, **{**given, **trap.arguments(position_ids)})

    with patch.object(worker.engine.model.hf, "forward", forward):
        yield


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    return hf_logprobs(load_causal_lm(folder), layout_batch()).detach()


@pytest.mark.parametrize("name", TRAPS)
def test_the_worker_guards_the_attention_of_hugging_face(name: str, folder: Path, expected: torch.Tensor) -> None:
    trap = TRAPS[name]
    with dtensor_worker(folder, attention=trap.attention) as worker:
        assert worker_error(worker, expected) < ROUNDING
        with unguarded(worker, trap):
            assert worker_error(worker, expected) > LEAK


def test_the_attention_of_the_worker_has_no_such_traps(folder: Path, expected: torch.Tensor) -> None:
    with dtensor_worker(folder, attention=None) as worker:
        assert worker_error(worker, expected) < ROUNDING
        for trap in TRAPS.values():
            with unguarded(worker, trap):
                if trap.mask == "boolean":
                    with pytest.raises(ValueError, match="makes its own mask"):
                        worker_error(worker, expected)
                else:
                    assert worker_error(worker, expected) < ROUNDING
        # It is the segments that keep sequences apart.
        with patch.object(worker.engine.model, "_takes_segments", False):
            assert worker_error(worker, expected) > LEAK


def test_scaled_positions_have_the_frequencies_of_hugging_face(tmp_path: Path) -> None:
    """megatron-core scales by an original length of 8192, whatever the model's."""
    folder = write_with_tokenizer(tmp_path, hf_model("llama", **TINY))
    exact = reference(folder, dtype=torch.float64)
    honest, faulty = (
        run_case(0, 1, Case(family="llama", engine="megatron", fault=fault), folder) for fault in (None, "rope")
    )
    for outcome, is_right in ((honest, True), (faulty, False)):
        assert outcome.logits is not None and exact.logits is not None
        error = np.abs(outcome.logits - exact.logits[list(outcome.rows)]).max()
        assert error < ROUNDING if is_right else error > 1e-3, error
