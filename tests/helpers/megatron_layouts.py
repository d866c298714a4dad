"""Runs one rank of a Megatron policy in a parallel layout, with whole logits and gradients, and with planted faults."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from nemo_rl.models.megatron import attention, setup
from nemo_rl.models.megatron.balance import AuxiliaryLoss
from nemo_rl.models.policy.microbatch import Microbatch, top_k_logits
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers import parallel_layouts
from tests.helpers.megatron_models import in_hf_names
from tests.helpers.parallel_layouts import LOSSES, Arrays, Case, Job, Outcome, routes_of, run_job, start
from tests.helpers.tiny_model import VOCAB

BUFFER = "e_score_correction_bias"
"""No parameter, but exported with them."""
Fault = Callable[[], AbstractContextManager[object]]


def run_case(rank: int, world_size: int, case: Case, folder: Path) -> Outcome:
    """(collective) Logits, log-probabilities, gradients and `STEPS` optimizer steps of one rank."""
    with FAULTS.get(case.fault or "", nullcontext)():
        job = start(rank, world_size, case, folder)
        worker = job.worker
        logits = logits_of(job)
        with kept_gradients(worker) as gradients:
            outcome = run_job(job, rank, LOSSES[case.loss])
        worker.shutdown()
    return replace(outcome, logits=logits, gradients=gradients if rank == 0 else None)


def forget_models() -> None:
    """Free the model of a case before the next: it is a ring of references, and keeps its groups' threads alive."""
    gc.collect()
    # What is left are modules; the next collection does not look at them again.
    gc.freeze()


def logits_of(job: Job) -> np.ndarray:
    """(collective) `[n, T, V]` at every token of this rank's rows, packed as the plan is; 0 in the padding."""
    worker = job.worker
    ids_nT = job.shard.tensor("input_ids")
    found_nTV = torch.zeros(*ids_nT.shape, VOCAB)

    def keep(micro: Microbatch, logits: torch.Tensor) -> torch.Tensor:
        segments = micro.inputs.segments
        values, tokens = top_k_logits(logits, segments, k=VOCAB, shard=runner._shard)
        whole = torch.empty_like(values).scatter_(2, tokens, values)
        for place, (row, length) in enumerate(zip(micro.rows, micro.lengths, strict=True)):
            line, first = (0, sum(segments.lengths[:place])) if job.plan.packed else (place, 0)
            found_nTV[row, :length] = whole[line, first : first + length]
        return values.sum()

    no_tokens, microbatches = torch.zeros_like(ids_nT, dtype=torch.bool), job.plan.microbatches[0]
    with routes_of(worker, job) as replay:
        runner = worker.engine.runner(worker.batch_layout(job.plan), replay)
        micros = runner._build(job.shard, microbatches, no_tokens)
        runner._run(micros, len(microbatches), keep, is_training=False, at_all_positions=True)
    return found_nTV.numpy()


@contextmanager
def kept_gradients(worker: PolicyWorker) -> Iterator[Arrays]:
    """Keep the whole gradients of the first optimizer step, before clipping."""
    kept: Arrays = {}
    finish = worker.engine.optimizer.finish

    def keep_and_finish() -> float | None:
        if not kept:
            kept.update(whole(worker, {name: weight.main_grad for name, weight in trained(worker).items()}))
        return finish()

    with patch.object(worker.engine.optimizer, "finish", keep_and_finish):
        yield kept


def moments(worker: PolicyWorker) -> Arrays:
    """(collective) AdamW's whole moments by parameter name."""
    found: Arrays = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        of_kind = whole(worker, worker.engine.optimizer.moments(kind))
        found |= {f"{name}.{kind}": value for name, value in of_kind.items()}
    return found


def trained(worker: PolicyWorker) -> dict[str, torch.nn.Parameter]:
    named = worker.engine.model.module.named_parameters()
    return {name: weight for name, weight in named if weight.requires_grad}


def whole(worker: PolicyWorker, parts: Mapping[str, torch.Tensor]) -> Arrays:
    """(collective) In Hugging Face names, zeros for weights that are not trained; without buffers."""
    parameters = dict(worker.engine.model.module.named_parameters())
    everything = {name: parts.get(name, torch.zeros_like(weight)) for name, weight in parameters.items()}
    named = in_hf_names(worker.engine.model, everything)
    return {name: value.float().numpy().copy() for name, value in named.items() if not name.endswith(BUFFER)}


# What must not be left out, left out.


def without_initialization() -> AbstractContextManager[object]:
    """megatron-core's `perform_initialization=False`: weights are loaded, so why initialize them?"""
    honest = setup.transformer_config

    def config(*args: object, **kwargs: object) -> object:
        found = honest(*args, **kwargs)  # type: ignore[arg-type]
        found.perform_initialization = False
        return found

    return patch.object(setup, "transformer_config", config)


def megatron_frequencies(config: PretrainedConfig) -> tuple[torch.Tensor, float]:
    """megatron-core's own of `rope_type` llama3, which takes 8192 for the original length."""
    # Only after our own door to megatron-core has adapted it to this machine.
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rope = config.rope_parameters
    embedding = RotaryEmbedding(
        kv_channels=config.hidden_size // config.num_attention_heads,
        rotary_percent=1.0,
        rotary_base=rope["rope_theta"],
        rope_scaling=True,
        rope_scaling_factor=rope["factor"],
        use_cpu_initialization=True,
    )
    return embedding.inv_freq, 1.0


def nothing(*_: object, **__: object) -> None:
    """Stands for a step that is left out."""


FAULTS: dict[str, Fault] = {
    "uninitialized": without_initialization,
    "unmarked": partial(patch.object, setup, "_mark_experts", nothing),
    "unaveraged": partial(patch.object, setup, "average_over_microbatches", nothing),
    "unmasked": partial(patch.object, AuxiliaryLoss, "padding", nothing),
    "rope": partial(patch.object, attention, "rotary_frequencies", megatron_frequencies),
    "doubled": partial(parallel_layouts.planted, "doubled"),
}


def harmful(fault: str | None) -> pytest.MarkDecorator:
    """Return a mark that skips a test whose fault does no harm with the megatron-core that is installed."""
    made_good = importlib.metadata.version("megatron-core") != "0.16.1" and fault in ("uninitialized", "unmarked")
    return pytest.mark.skipif(made_good, reason="this megatron-core marks weights and experts by itself")
