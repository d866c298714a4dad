"""One rank of a policy in a layout: what it computes on its shard of a fixed batch, as arrays."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.algorithms.losses.policy_loss import DistillationLoss, PolicyLoss
from nemo_rl.config.backends import DTensorConfig, LoraConfig, MegatronConfig, MegatronOptimizerConfig, OptimizerConfig
from nemo_rl.config.distillation import DistillationConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig, RouterReplayConfig
from nemo_rl.distributed import collectives
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.packing import PackPlan, plan_fixed, plan_packs, plan_padded
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.models.dtensor.parallelize import full_weight
from nemo_rl.models.head.logprobs import TopTokens
from nemo_rl.models.hf.loading import load_causal_lm, load_model_config, named_weights
from nemo_rl.models.hf.modules import HFRouters
from nemo_rl.models.policy.interfaces import ENTROPY, POLICY_TOPK
from nemo_rl.models.policy.routes.worker_replay import PassRoutes
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from tests.helpers.case_selection import FULL
from tests.helpers.distillation_reference import slow_distillation, teacher_columns, with_teacher
from tests.helpers.hf_reference import global_scale, hf_entropies, hf_logprobs
from tests.helpers.tiny_model import VOCAB, tiny_batch, tiny_policy, tiny_worker

LOSS = PolicyLoss(config=LossConfig())
LOSSES = {
    "clipped_pg": LOSS,
    # Needs whole rows: for its ratio, for its correction, for its mean.
    "gspo": PolicyLoss(
        config=LossConfig(
            name="gspo",
            token_level_loss=False,
            use_importance_sampling_correction=True,
            truncated_importance_sampling_type="seq-tis",
            truncated_importance_sampling_ratio=1.5,
            reference_policy_kl_gradient="straight_through",
        )
    ),
    "entropy": PolicyLoss(config=LossConfig(entropy_coefficient=0.3)),
    "distillation": DistillationLoss(
        config=LossConfig(
            distillation=DistillationConfig(enabled=True, mode="added", kl="mixed", mixed_weight=0.3, coefficient=0.7)
        )
    ),
}
TOP_K = 5
"""Tokens of a teacher's distribution."""
AUX_COEFFICIENT = 0.1
ROWS = 8
STEPS = 3 if os.environ.get(FULL) else 2
# Epsilon above the rounding of a gradient: with a smaller one AdamW takes a whole step for a zero that was rounded.
ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "eps": 1e-6}
MAX_GRAD_NORM = 0.2
"""Clipping norm below the gradients' norms, so that every step is clipped."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A layout and a way to form microbatches."""

    family: str
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    copies: int = 1
    engine: str = "dtensor"
    """`dtensor` or `megatron`."""
    batching: str = "packed"
    """`packed`, `padded` (dynamic batching) or `fixed`."""
    capacity: int = 64
    """Tokens, or rows for `fixed`, in a microbatch."""
    recompute: bool | str = False
    """False, or True for all of it, or `selective`."""
    compiled: bool = False
    """True with compiled decoder layers."""
    aux: bool = False
    """True with a loss that balances experts."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Further keys of `policy.megatron_cfg`."""
    precision: str = "float32"
    replay: bool = False
    """True with forced routes."""
    loss: str = "clipped_pg"
    """Name of one of `LOSSES`."""
    lora: Mapping[str, object] = field(default_factory=dict)
    """Keys of `policy.lora`; without any there are no adapters."""
    fault: str | None = None

    def __str__(self) -> str:
        axes = f"tp{self.tp}cp{self.cp}{'sp' if self.sp else ''}"
        axes += "".join(f"{name}{size}" for name, size in (("pp", self.pp), ("ep", self.ep)) if size > 1)
        axes += f"copies{self.copies}" if self.copies > 1 else ""
        axes += f"etp{self.etp}" if self.etp is not None else ""
        extra = {True: "-recompute", False: "", "selective": "-selective"}[self.recompute]
        extra += "-compiled" if self.compiled else ""
        extra += f"{'-aux' if self.aux else ''}{'-' + self.fault if self.fault else ''}"
        extra += f"-{self.engine}" if self.replay else ""
        extra += "".join(f"-{name}={value}" for name, value in self.settings.items())
        extra += "" if self.precision == "float32" else f"-{self.precision}"
        extra += "".join(f"-{name}={value}" for name, value in self.lora.items())
        extra += "" if self.loss == "clipped_pg" else f"-{self.loss}"
        return f"{self.family}-{axes}-{self.batching}{self.capacity}{extra}"


AXES: Mapping[str, Callable[[Case], Hashable]] = {
    name: attrgetter(name)
    for name in ("engine", "family", "tp", "cp", "pp", "ep", "etp", "sp", "batching", "recompute")
}
"""Axes of which `make test` has every pair of values."""
SPLITS = {name: AXES[name] for name in ("tp", "cp", "pp", "ep", "etp", "sp")}
"""Axes of four ranks, which show how axes work together; two ranks show the families and the ways to run."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The results of one rank."""

    rows: tuple[int, ...]
    num_microbatches: int
    logprobs: np.ndarray
    """`[n, T]` of this rank's rows, before training."""
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: Arrays | None
    """Whole weights after `STEPS` steps; rank 0 only."""
    gradients: Arrays | None = None
    """Whole ones of the first step, before clipping; rank 0 only."""
    logits: np.ndarray | None = None
    """`[n, T, V]` before training, 0 in the padding."""
    squares: np.ndarray | None = None
    """`[n, T]` sums of squared probabilities, of cases whose loss needs whole distributions."""
    topk: np.ndarray | None = None
    """`[n, T, TOP_K]` log-probabilities of the most likely tokens, of cases that distil or force routes."""
    topk_ids: np.ndarray | None = None
    """Their ids."""
    is_last_stage: bool = True
    """False where log-probabilities and logits are zeros, because the stage has none."""

    @property
    def more(self) -> tuple[str, ...]:
        """Names of outputs that only some cases have."""
        return tuple(name for name in ("squares", "topk", "topk_ids") if getattr(self, name) is not None)


@dataclass(frozen=True, slots=True)
class Folders:
    """Models and checkpoints of a table, each with a folder."""

    root: Path

    def model(self, family: str) -> Path:
        return self.root / family

    def checkpoint(self, name: str) -> Path:
        return self.root / "checkpoints" / name


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rank with its worker and its part of the batch."""

    worker: PolicyWorker
    layout: ParallelLayout
    rows: tuple[int, ...]
    plan: PackPlan
    shard: BatchedDataDict

    @property
    def all_tokens(self) -> BatchedDataDict:
        """The shard, so that log-probabilities of prompts are computed too."""
        return BatchedDataDict({name: column for name, column in self.shard.items() if name != "token_mask"})


def layout_batch() -> BatchedDataDict:
    """Return rows of unequal lengths, some of weight 0 and one half, and one without a trained token."""
    batch = tiny_batch(ROWS)
    batch.tensor("sample_mask")[2] = 0.5
    batch.tensor("token_mask")[1] = False
    return batch


def forced_routes(config: PretrainedConfig) -> torch.Tensor:
    """Return `[N, T, L, K]` int16 random experts for every token of `layout_batch`; a few tokens lack a route."""
    shape, draw = layout_batch().tensor("input_ids").shape, torch.Generator().manual_seed(7)
    num_layers = config.num_hidden_layers - len(config.mlp_only_layers)
    scores = torch.rand(*shape, num_layers, config.num_experts, generator=draw)
    routes = scores.argsort(-1)[..., : config.num_experts_per_tok].to(torch.int16)
    routes[0, 2:5] = -1
    routes[3, 1] = -1
    return routes


def force_routes(model: PreTrainedModel, routes_NTLK: torch.Tensor) -> None:
    """Force the routes of a model that is called once for every row in turn; -1 leaves the choice to the model."""
    routers = HFRouters(model)
    lengths, calls = layout_batch().tensor("input_lengths").tolist(), Counter[int]()

    def choose(layer: int, own: torch.Tensor) -> torch.Tensor:
        row = calls[layer] % ROWS
        calls[layer] += 1
        ids = routes_NTLK[row, : lengths[row], routers.layers.index(layer)].long()
        return torch.where(ids < 0, own, ids)

    # For as long as the model lives.
    routers._choose = choose


def megatron_policy(case: Case, folder: Path) -> PolicyConfig:
    recompute: dict[str, object] = {"activation_checkpointing": bool(case.recompute)}
    if case.recompute == "selective":
        recompute |= {"recompute_granularity": "selective"}
    balance: dict[str, object] = {}
    if case.aux:
        balance = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": AUX_COEFFICIENT}
    section = MegatronConfig(
        enabled=True,
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        sequence_parallel=case.sp,
        optimizer=MegatronOptimizerConfig(
            lr=ADAM["lr"],
            min_lr=0.0,
            adam_beta1=ADAM["betas"][0],
            adam_beta2=ADAM["betas"][1],
            adam_eps=ADAM["eps"],
            weight_decay=ADAM["weight_decay"],
        ),
        **{**recompute, **balance, **case.settings},
    )
    return tiny_policy(folder, dtensor_cfg=DTensorConfig(enabled=False), megatron_cfg=section, **_common(case))


def _common(case: Case) -> dict[str, object]:
    replay = RouterReplayConfig(enabled=case.replay)
    lora = LoraConfig(enabled=bool(case.lora), **case.lora)
    return {"precision": case.precision, "max_grad_norm": MAX_GRAD_NORM, "router_replay": replay, "lora": lora}


def policy_of(case: Case, folder: Path) -> PolicyConfig:
    if case.engine == "megatron":
        return megatron_policy(case, folder)
    sizes = DTensorConfig(
        tensor_parallel_size=case.tp,
        context_parallel_size=case.cp,
        replicate_size=case.copies,
        sequence_parallel=case.sp,
        activation_checkpointing=case.recompute,
        compile="on" if case.compiled else "off",
    )
    optimizer = OptimizerConfig(kwargs=dict(ADAM))
    return tiny_policy(folder, dtensor_cfg=sizes, optimizer=optimizer, **_common(case))


def plan_of(case: Case, layout: ParallelLayout) -> PackPlan:
    lengths = layout_batch().tensor("input_lengths").tolist()
    common = {"dp_world": layout.dp, "pad_multiple": layout.length_multiple}
    if case.batching == "uneven":
        # The last ranks have a microbatch without rows, the first a microbatch with one.
        share = ROWS // layout.dp
        of_rank = [tuple(range(rank * share, (rank + 1) * share)) for rank in range(layout.dp)]
        microbatches = [((rows[0],), rows[1:]) if rank == 0 else (rows, ()) for rank, rows in enumerate(of_rank)]
        return PackPlan(microbatches=tuple(microbatches), steps=(2,), pad_to=max(lengths), packed=True)
    if case.batching == "fixed":
        return plan_fixed(lengths, rows_per_microbatch=case.capacity, **common)
    plan = plan_packs if case.batching == "packed" else plan_padded
    return plan(lengths, capacity=case.capacity, **common)


def start(rank: int, world_size: int, case: Case, folder: Path, **parts: object) -> Job:
    """(collective) A rank that is ready to train; `parts` as `compose_worker` takes them."""
    policy = policy_of(case, folder)
    layout = ParallelLayout.of_policy(policy, world_size=world_size)
    worker = tiny_worker(policy, rank=rank, world_size=world_size, **parts)
    plan, dp = plan_of(case, layout), layout.coordinates(rank).dp
    rows = plan.rows_of_rank(dp)
    batch = layout_batch()
    if case.replay:
        batch["routed_experts"] = forced_routes(load_model_config(str(folder)))
    if case.loss == "distillation":
        batch = with_teacher(batch, vocab=VOCAB, k=TOP_K)
    if case.fault == "swap":
        batch["advantages"] = batch.tensor("advantages")[[2, 1, 0, *range(3, ROWS)]]
    return Job(worker=worker, layout=layout, rows=rows, plan=plan.for_rank(dp), shard=batch.select_indices(rows))


def run_case(rank: int, world_size: int, case: Case, folder: Path) -> Outcome:
    """Run the log-probabilities and `STEPS` optimizer steps of one rank."""
    job = start(rank, world_size, case, folder)
    with planted(case.fault):
        outcome = run_job(job, rank, LOSSES[case.loss])
    job.worker.shutdown()
    return outcome


def run_job(job: Job, rank: int, loss_fn: PolicyLoss = LOSS) -> Outcome:
    """(collective) What the worker of a rank does."""
    squares = topk = topk_ids = None
    if POLICY_TOPK in loss_fn.input_fields or "routed_experts" in job.shard:
        topk_ids, topk = job.worker.get_topk_logprobs(job.all_tokens, TopTokens(k=TOP_K), plan=job.plan)
    if ENTROPY in loss_fn.input_fields:
        logprobs, squares = job.worker.get_logprobs_with_squares(job.all_tokens, plan=job.plan)
    else:
        logprobs = job.worker.get_logprobs(job.all_tokens, plan=job.plan)
    results = [job.worker.train(job.shard, loss_fn, plan=job.plan) for _ in range(STEPS)]
    weights = exported(job.worker)
    return Outcome(
        rows=job.rows,
        num_microbatches=len(job.plan.microbatches[0]),
        logprobs=logprobs.numpy(),
        squares=None if squares is None else squares.numpy(),
        topk=None if topk is None else topk.numpy(),
        topk_ids=None if topk_ids is None else topk_ids.numpy(),
        losses=tuple(result.loss[0] for result in results),
        norms=tuple(result.grad_norm[0] for result in results),
        weights=weights if rank == 0 else None,
        is_last_stage=job.layout.coordinates(rank).pp == job.layout.pp - 1,
    )


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Plant the fault `doubled`: a gradient of the context axis that is counted twice."""
    if fault != "doubled":
        yield
        return
    honest = collectives._GatherAlong.backward

    def doubled(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return honest(ctx, 2 * grad)

    with patch.object(collectives._GatherAlong, "backward", staticmethod(doubled)):
        yield


MoreLoss = Callable[[torch.nn.Module], Callable[[], torch.Tensor]]
"""Given the model before it runs; what it returns is called after the passes and added to the loss."""


def reference(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    more_loss: MoreLoss | None = None,
    prepare: Callable[[PreTrainedModel], None] = lambda _: None,
    loss: str = "clipped_pg",
) -> Outcome:
    """Train the single-process Hugging Face model, one row at a time."""
    batch = layout_batch()
    model = load_causal_lm(folder, dtype=dtype)
    prepare(model)
    # Grouped kernels do not know float64.
    model.config._experts_implementation = "eager"
    adam = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms, logits = [], [], hf_logits(model, batch)
    first: np.ndarray | None = None
    gradients: Arrays = {}
    added = more_loss(model) if more_loss is not None else None
    for step in range(STEPS):
        logprobs = hf_logprobs(model, batch)
        first = logprobs.detach().numpy() if first is None else first
        columns = {**batch, ENTROPY: hf_entropies(model, batch)} if loss == "entropy" else batch
        if loss == "distillation":
            section, valid = LOSSES[loss].config.distillation, global_scale(batch).valid_tokens
            value = LOSS(logprobs, batch, scale=global_scale(batch)).loss
            taught = with_teacher(batch, vocab=VOCAB, k=TOP_K)
            value = value + slow_distillation(model, taught, section, valid_tokens=valid)
        else:
            value = LOSSES[loss](logprobs, columns, scale=global_scale(batch)).loss
        (value if added is None else value + added()).backward()
        if step == 0:
            gradients = {name: weight.grad.numpy().copy() for name, weight in model.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        adam.step()
        adam.zero_grad()
        losses.append(value.item())
    assert first is not None
    return Outcome(
        rows=tuple(range(ROWS)),
        num_microbatches=ROWS,
        logprobs=first,
        losses=tuple(losses),
        norms=tuple(norms),
        weights={name: weight.detach().numpy() for name, weight in named_weights(model)},
        gradients=gradients,
        logits=logits.numpy(),
        squares=squares_of(logits).numpy(),
        topk=top_of(logits)[0].numpy(),
        topk_ids=top_of(logits)[1].numpy(),
    )


def top_of(logits_NTV: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return log-probabilities `[N, T, TOP_K + 1]` and ids `[N, T, TOP_K]` for each token, from the logits at the token
    before; else 0."""
    ids, values = teacher_columns(logits_NTV.log_softmax(-1), TOP_K)
    is_token_NT = torch.arange(values.shape[1]) < layout_batch().tensor("input_lengths")[:, None]
    shifted = [torch.nn.functional.pad(part[:, :-1], (0, 0, 1, 0)) for part in (values, ids)]
    return tuple(torch.where(is_token_NT[..., None], part, 0) for part in shifted)


def squares_of(logits_NTV: torch.Tensor) -> torch.Tensor:
    """Return `[N, T]` sums of squared probabilities for each token, from the logits at the token before."""
    squares_NT = torch.nn.functional.pad(logits_NTV.softmax(-1).square().sum(-1)[:, :-1], (1, 0))
    is_token_NT = torch.arange(squares_NT.shape[1]) < layout_batch().tensor("input_lengths")[:, None]
    return torch.where(is_token_NT, squares_NT, 0.0)


@torch.no_grad()
def hf_logits(model: torch.nn.Module, batch: BatchedDataDict) -> torch.Tensor:
    """Return `[N, T, V]` logits, 0 in the padding."""
    ids, rows = batch.tensor("input_ids").long(), []
    for i, length in enumerate(batch.tensor("input_lengths").tolist()):
        logits = model(input_ids=ids[i : i + 1, :length], use_cache=False).logits[0]
        rows.append(torch.nn.functional.pad(logits, (0, 0, 0, ids.shape[1] - length)))
    return torch.stack(rows)


def routes_of(worker: PolicyWorker, job: Job) -> AbstractContextManager[PassRoutes]:
    """(collective) Around log-probability passes of the shard: its forced routes, if it has any."""
    return worker.replaying(WorkerPass.PREV_LOGPROBS, job.shard, job.plan, None)


def exported(worker: PolicyWorker) -> Arrays:
    """Return weights and adapters as arrays: tensors would travel as file descriptors of a process that has ended by
    then."""
    tensors = chain(worker.export_weights(), worker.engine.full_adapter())
    return {name: weight.float().numpy().copy() for name, weight in tensors}


def moments(worker: PolicyWorker) -> Arrays:
    """(collective) AdamW's whole moments of what is trained, by parameter name."""
    found: Arrays = {}
    for name, parameter in worker.engine.model.hf.named_parameters():
        if not parameter.requires_grad:
            continue
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{kind}"] = full_weight(worker.engine.optimizer.state[parameter][kind]).numpy().copy()
    return found


Moments = Callable[[PolicyWorker], Arrays]


def save_after_a_step(
    rank: int, world_size: int, case: Case, folder: Path, target: Path, *, moments_of: Moments = moments
) -> dict[str, object]:
    """Save a checkpoint after one step, and return its tensors and the loss of the next."""
    job = start(rank, world_size, case, folder)
    worker = job.worker
    worker.train(job.shard, LOSS, plan=job.plan)
    worker.save_checkpoint(weights=target / "weights", optimizer=target / "optimizer", tokenizer=target / "weights")
    saved = {"weights": exported(worker), "moments": moments_of(worker)}
    next_loss = worker.train(job.shard, LOSS, plan=job.plan).loss[0]
    saved |= {"loss": next_loss, "after": exported(worker)}
    worker.shutdown()
    return saved


def load_and_step(
    rank: int, world_size: int, case: Case, folder: Path, target: Path, *, moments_of: Moments = moments
) -> dict[str, object]:
    """Load a checkpoint of any layout in this one, and return its tensors and the loss of the next step."""
    job = start(rank, world_size, case, folder)
    worker = job.worker
    worker.load_checkpoint(weights=target / "weights", optimizer=target / "optimizer")
    loaded = {"weights": exported(worker), "moments": moments_of(worker)}
    next_loss = worker.train(job.shard, LOSS, plan=job.plan).loss[0]
    loaded |= {"loss": next_loss, "after": exported(worker)}
    worker.shutdown()
    return loaded


def exported_from(rank: int, world_size: int, case: Case, folder: Path, weights: Path) -> Arrays:
    """(collective) What a worker exports that has loaded the weights of another one's checkpoint."""
    job = start(rank, world_size, case, folder)
    job.worker.load_checkpoint(weights=weights, optimizer=None)
    found = exported(job.worker)
    job.worker.shutdown()
    return found


def relative_gap(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference over the largest element, or over 1 where all are 0, as for an unused expert."""
    scale = float(np.abs(expected).max())
    return float(np.abs(found - expected).max()) / (scale or 1.0)


def compare_arrays(
    found: Arrays | None, expected: Arrays | None, gap: Callable[[np.ndarray, np.ndarray], float], bound: float
) -> None:
    assert found is not None and expected is not None
    assert sorted(found) == sorted(expected)
    gaps = {name: gap(found[name], expected[name]) for name in expected}
    worst = max(gaps, key=lambda name: gaps[name])
    assert gaps[worst] <= bound, f"{worst} differs by {gaps[worst]:.1e}"
