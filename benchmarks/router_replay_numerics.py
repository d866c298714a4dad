"""Log-probabilities of sampled tokens: rollouts in bfloat16, a trainer in float32, free and with the rollout's routes.

Called by `router_replay.py`. Rollout and trainer have the same weights, so every difference is one of computation.
Shapes: N rows, T tokens, L layers with experts, K experts of a token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.router_replay_models import ENGINES, TASK, Engine, open_worker, policy_of
from benchmarks.router_replay_report import Comparison, Mismatch
from examples.starter import prompt_ids
from nemo_rl.algorithms.advantage_estimator import group_statistics
from nemo_rl.algorithms.estimators import estimate_advantages
from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.loss import LossConfig
from nemo_rl.data.datasets import RawPrompt
from nemo_rl.data.thinking import final_answer
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import plan_packs
from nemo_rl.experience.payload import build_columns
from nemo_rl.jagged import values_of
from nemo_rl.models.generation.interfaces import GenerationOutput, GenerationRequest, RecordedRoutes, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.hf.modules import HFRouters
from nemo_rl.routes.shape import dummy_route, place_routes

__all__ = ["Rollouts", "compare", "dense_routes", "sample"]

logger = logging.getLogger(__name__)

GROUP_SIZE = 8
PROBLEMS_SEED = 1000
"""Far from the seeds of the warm start."""
CAPACITY = 4096
"""Tokens of a microbatch."""
ROWS_PER_PASS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """One batch as a trainer gets it."""

    batch: BatchedDataDict
    """All columns of GRPO, and `routed_experts` `[N, T, L, K]` int16."""
    sampled_NT: torch.Tensor
    """`[N, T]` bool: tokens that the engine has drawn."""
    right: float
    """Share of right answers."""


def sample(folder: Path, *, seed: int, num_prompts: int) -> Rollouts:
    """Rollouts of the embedded engine in bfloat16, with routes; rewards as in the recipe."""
    config = policy_of(folder, "dtensor", is_replayed=True, max_length=TASK.max_length)
    tokenizer = load_tokenizer(folder)
    drawn = TASK.training(size=num_prompts, seed=PROBLEMS_SEED + seed)
    prompts = tuple(prompt_ids(tokenizer, problem.text) for problem in drawn)
    num_rows = len(prompts) * GROUP_SIZE
    engine = TorchEngine.from_config(config, weight_version=0)
    output = engine.generate(
        GenerationRequest(
            prompt_ids=prompts,
            seeds=tuple(range(seed * num_rows, (seed + 1) * num_rows)),
            sampling=SamplingParams(
                temperature=1.0,
                max_new_tokens=config.longest_response,
                stop_token_ids=(int(tokenizer.eos_token_id),),
            ),
            with_routes=True,
        )
    )
    assert output.routes is not None
    batch = build_columns(prompts, output, group_size=GROUP_SIZE, pad_token_id=int(tokenizer.pad_token_id))
    texts = [str(tokenizer.decode(ids[:-1].tolist())) for ids in output.token_ids.split(output.lengths.tolist())]
    rewards = _rewards(drawn, texts, output)
    uids = [row // GROUP_SIZE for row in range(num_rows)]
    stats = group_statistics(rewards, uids)
    batch["advantages"] = estimate_advantages(rewards, stats, leave_one_out=True, normalize=True)
    batch["prev_logprobs"] = batch.tensor("generation_logprobs")
    lengths = batch.tensor("input_lengths")
    batch["routed_experts"] = dense_routes(output.routes, lengths, width=batch.tensor("input_ids").shape[1])
    return Rollouts(batch=batch, sampled_NT=batch.tensor("token_mask"), right=float(rewards.mean()))


def dense_routes(routes: RecordedRoutes, lengths: torch.Tensor, *, width: int) -> torch.Tensor:
    """`[N, T, L, K]` int16, decoded; the last token of a row and the padding have a valid route."""
    placed = place_routes([routes], lengths=lengths, keys=[f"row {row}" for row in range(len(lengths))])
    shape = routes.shape
    dense = dummy_route(shape.top_k).repeat(len(lengths), width, len(shape.layers), 1)
    dense[torch.arange(width) < lengths[:, None]] = values_of(placed)
    return dense


def compare(folder: Path, rollouts: Rollouts, *, seed: int, is_replay_off: bool = False) -> Iterator[Comparison]:
    """Both workers on the same rollouts.

    Args:
        is_replay_off: the planted fault: what is reported as replayed runs with the model's own routes.
    """
    flips = _flips(folder, rollouts)
    for engine in ENGINES:
        free = _mismatch(folder, rollouts, engine, is_replayed=False)
        replayed = _mismatch(folder, rollouts, engine, is_replayed=not is_replay_off)
        logger.info("seed %d, %s: k3 %.3g free, %.3g replayed", seed, engine, free.k3, replayed.k3)
        yield Comparison(worker=engine, seeds=(seed,), free=free, replayed=replayed, flips=flips)


def _rewards(drawn: list[RawPrompt], texts: list[str], output: GenerationOutput) -> torch.Tensor:
    answers = [str(problem.answer) for problem in drawn for _ in range(GROUP_SIZE)]
    is_right = torch.tensor([final_answer(text) == answer for text, answer in zip(texts, answers, strict=True)])
    return (is_right & ~output.truncated).float()


def _mismatch(folder: Path, rollouts: Rollouts, engine: Engine, *, is_replayed: bool) -> Mismatch:
    config = policy_of(folder, engine, is_replayed=is_replayed, max_length=TASK.max_length)
    batch = rollouts.batch
    if not is_replayed:
        batch = BatchedDataDict({name: column for name, column in batch.items() if name != "routed_experts"})
    plan = plan_packs(batch.tensor("input_lengths").tolist(), capacity=CAPACITY, dp_world=1).for_rank(0)
    loss_fn = PolicyLoss(config=LossConfig(ratio_clip_max=0.28, reference_policy_kl_penalty=0.0))
    with open_worker(config) as worker:
        logprobs_NT = worker.get_logprobs(batch, plan=plan)
        (loss,) = worker.train(batch, loss_fn, eval_mode=True, plan=plan).loss
    differences_NT = logprobs_NT - batch.tensor("generation_logprobs")
    return Mismatch(differences=differences_NT[rollouts.sampled_NT], loss=loss)


def _flips(folder: Path, rollouts: Rollouts) -> float:
    """Share of token-layer pairs that were fed to the engine and for which the float32 model chooses other experts."""
    model = load_causal_lm(folder)
    routers = HFRouters(model)
    batch = rollouts.batch
    ids_NT, lengths_N = batch.tensor("input_ids").long(), batch.tensor("input_lengths")
    routes_NTLK = batch.tensor("routed_experts").long()
    is_fed_NT = torch.arange(ids_NT.shape[1]) < lengths_N[:, None] - 1
    flips = pairs = 0
    for start in range(0, len(ids_NT), ROWS_PER_PASS):
        part = slice(start, start + ROWS_PER_PASS)
        own: list[torch.Tensor] = []
        with torch.no_grad(), routers.choosing(lambda layer, ids: own.append(ids)):  # noqa: B023 - used within the pass
            model(input_ids=ids_NT[part], use_cache=False, logits_to_keep=1)
        for column, ids in enumerate(own):
            recorded = routes_NTLK[part, :, column].flatten(0, 1)
            differs = (ids.sort(dim=-1).values != recorded.sort(dim=-1).values).any(-1)
            flips += int(differs[is_fed_NT[part].flatten()].sum())
        pairs += int(is_fed_NT[part].sum()) * len(own)
    return flips / pairs
