"""What replay adds to one forward pass: interleaved pairs of log-probability passes of one worker, in CPU time.

Called by `router_replay.py`. CPU time of the process does not depend on who else uses the machine; pairs and their
changing order take care of slow drifts.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.router_replay_models import NUM_EXPERTS, Engine, open_worker, policy_of
from benchmarks.router_replay_report import Overhead
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.hf.modules import HFRouters
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker

__all__ = ["OverheadCase", "measure_overhead"]

logger = logging.getLogger(__name__)

WARMUP_PAIRS = 2
ROUTES = "routed_experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadCase:
    """What one pass computes."""

    hidden: int = 512
    num_rows: int = 4
    row_tokens: int = 1024
    num_pairs: int = 30

    @property
    def tokens(self) -> int:
        return self.num_rows * self.row_tokens


def measure_overhead(folder: Path, engine: Engine, case: OverheadCase) -> Overhead:
    """Pairs of passes over the same tokens, with the model's own choice and with the same choice given."""
    batch = _batch(folder, case)
    free_s: list[float] = []
    replayed_s: list[float] = []
    config = policy_of(folder, engine, is_replayed=True, max_length=case.row_tokens)
    with open_worker(config) as worker:
        _check_replays(worker, batch)
        for pair in range(-WARMUP_PAIRS, case.num_pairs):
            order = (False, True) if pair % 2 else (True, False)
            seconds = {is_replayed: _pass_s(worker, batch, is_replayed=is_replayed) for is_replayed in order}
            if pair >= 0:
                free_s.append(seconds[False])
                replayed_s.append(seconds[True])
    logger.info("overhead, %s: %d pairs", engine, len(free_s))
    return Overhead(
        worker=engine, tokens=case.tokens, hidden=case.hidden, free_s=tuple(free_s), replayed_s=tuple(replayed_s)
    )


def _pass_s(worker: PolicyWorker, batch: BatchedDataDict, *, is_replayed: bool) -> float:
    started = time.process_time()
    worker.get_logprobs(batch, mbs=batch.size, replay=is_replayed)
    return time.process_time() - started


def _check_replays(worker: PolicyWorker, batch: BatchedDataDict) -> None:
    """Other experts than the model's own must give other log-probabilities, or nothing is replayed here."""
    own = worker.get_logprobs(batch, mbs=batch.size, replay=True)
    free = worker.get_logprobs(batch, mbs=batch.size, replay=False)
    other = BatchedDataDict({**batch, ROUTES: (batch.tensor(ROUTES) + 1) % NUM_EXPERTS})
    forced = worker.get_logprobs(other, mbs=batch.size, replay=True)
    assert torch.allclose(own, free, atol=1e-4), "the model's own routes, replayed, must change nothing"
    assert not torch.allclose(forced, free, atol=1e-4), "other routes must change the log-probabilities"


def _batch(folder: Path, case: OverheadCase) -> BatchedDataDict:
    """Full rows of random tokens with the model's own routes: both passes of a pair do the same work for experts."""
    model = load_causal_lm(folder)
    routers = HFRouters(model)
    generator = torch.Generator().manual_seed(0)
    shape = (case.num_rows, case.row_tokens)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=generator, dtype=torch.int32)
    own: list[torch.Tensor] = []
    with torch.no_grad(), routers.choosing(lambda layer, chosen: own.append(chosen)):
        model(input_ids=ids.long(), use_cache=False, logits_to_keep=1)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[:, 0] = False
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full(shape[:1], case.row_tokens, dtype=torch.int32),
            "token_mask": mask,
            "sample_mask": torch.ones(case.num_rows),
            ROUTES: torch.stack(own, dim=1).unflatten(0, shape).to(torch.int16),
        }
    )
