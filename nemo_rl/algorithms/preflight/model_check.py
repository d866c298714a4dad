"""`check_model`: whether a tiny model of the very classes has the same numbers in worker and engine as in Hugging Face.

Called by preflight. From the real config a model is made with the same switches, small sizes and random weights. A few
rows of unequal length go through it as the recipe has them: through the policy worker, padded and packed, in its
layout, forward and backward, in training mode, and through the embedded engine; then it is saved and loaded again.
Each is compared with the plain model on one row at a time, with eager attention in float64.

    check_model
      small_model_config, write_small_model    the tiny model
      reference                                rows one by one, float64
      Trial.run                                worker, engine, files: what the recipe uses
      difference                               the first site, log-probability, gradient or weight that differs

Invariant: nothing of it is left in the process: no process group, no random state.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

import nemo_rl.models
from nemo_rl.algorithms.grpo import plan_train
from nemo_rl.algorithms.losses.nll import NLLLoss
from nemo_rl.config.backends import OptimizerConfig
from nemo_rl.config.policy import ParallelSizes, PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.layout import ParallelLayout
from nemo_rl.distributed.local_job import quiet_libraries, run_job
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import NemoRLError, UserError
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.models.generation.torch_engine.engine import TorchEngine
from nemo_rl.models.hf.loading import load_causal_lm, load_model_config, model_class, named_weights
from nemo_rl.models.hf.modules import HFSites
from nemo_rl.models.hf.tiny_model import WINDOW, language_config, write_small_model
from nemo_rl.models.hf.writing import ModelDescription, write_folder
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.policy.observer import Capture, HookObserver, SiteSink
from nemo_rl.models.policy.workers.compose import worker_of_job
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.vision import SMALL_FEATURES, PromptImages, family_of
from nemo_rl.records.sites import Direction, SiteKind, execution_order
from nemo_rl.utils.memory import package_versions

__all__ = ["Trial", "check_model", "packs", "trials_of"]

logger = logging.getLogger(__name__)

LENGTHS = (3 * WINDOW - 3, 2 * WINDOW + 1, WINDOW - 5, 2 * WINDOW + 9)
"""Tokens of the rows: beyond windows and chunks, and within."""
PROMPTS = (5, 11, 3, 20)
"""Tokens of each row that the engine is given as its prompt."""
IMAGES = (1, 2, 0, 3)
"""Images in the prompt of each row, of models that take any."""
TOKENS_OF_A_PASS = 128
LIMIT = 1e-3
"""Largest difference of a log-probability, and largest difference of gradients relative to their norm. Rounding of
float32 in so small a model stays a hundred times below, the faults that are looked for a hundred times above."""
WATCHED = (SiteKind.EMBED, SiteKind.LAYER_IN, SiteKind.ATTN_OUT, SiteKind.MLP_OUT, SiteKind.LAYER_OUT)
"""Sites that are compared where log-probabilities differ: those that every rank has whole."""
STEP = 64.0
"""Learning rate of the plain gradient descent by which gradients are read off the weights."""
TIMEOUT_S = 120.0
PACKED = "sequence_packing.enabled"
"""Key of the trial with packed rows."""
MAX_REASON = 240
"""Characters that are told of an error."""
CACHE = Path("~/.cache/nemo_rl/model_checks")
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The numbers that one way of computing gives for the rows.

    Example:
        Two rows of 3 and 2 tokens: `logprobs` has 5 numbers, 0.0 at the first token of each row.
    """

    logprobs: torch.Tensor
    """`[R]` of all tokens, row by row."""
    sites: Mapping[tuple[SiteKind, int | None], torch.Tensor] = field(default_factory=dict)
    """`[R, h]` by kind and layer."""
    loss: float | None = None
    """Mean negative log-likelihood in training mode."""
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Gradients by the name of their weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One way in which the recipe runs the model."""

    name: str
    key: str
    """Key of the recipe that asks for it."""
    run: Callable[[Path, PolicyConfig], Found]
    """Computes on the tiny model's folder."""
    policy: PolicyConfig
    """Settings of the recipe, without its sizes."""


def packs(config: PolicyConfig) -> bool:
    """Return whether the model of a recipe with packed rows has its own numbers in them; if not, the log says why.

    A model that cannot be checked at all is left to `check_model`.
    """
    wanted = [] if config.megatron_cfg.enabled else [each for each in trials_of(config) if each.key == PACKED]
    try:
        lines = check_model(config, trials=wanted) if wanted else []
    except UserError:
        return True
    for line in lines:
        logger.warning("rows are not packed, as policy.%s=auto would have them: %s", PACKED, line)
    return not lines


def check_model(
    config: PolicyConfig, *, cache: Path | None = CACHE, trials: Sequence[Trial] | None = None
) -> list[str]:
    """Return a line for each way in which the recipe would get other numbers than the model has.

    Args:
        config: whose `model_name` is a folder.
        trials: the ways; None: all that the recipe asks for.
        cache: where it is kept which checks have passed; None: nowhere.

    Raises:
        UserError: no tiny model can be made of this one.
    """
    real = language_config(load_model_config(config.model_name))
    trials = trials_of(config) if trials is None else trials
    place = None if cache is None else cache.expanduser() / _digest(real, trials)
    if place is not None and place.is_file():
        return []
    lines = check_config(real, trials)
    if place is not None and not lines:
        # A cache that cannot be written is none.
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    return lines


def check_config(real: PretrainedConfig, trials: Sequence[Trial]) -> list[str]:
    """Return a line for each of the trials that does not have the numbers of the model; raises as `check_model`."""
    with tempfile.TemporaryDirectory(prefix="nemo_rl_check_") as name, _untouched(), quiet_libraries():
        folder = Path(name) / "model"
        # Vocabulary and heads divide by every axis, as `check_policy_fits` asks of the real model.
        write_small_model(folder, real, ParallelSizes(), real_sizes=ParallelSizes())
        expected = _reference(folder)
        lines = [_problem(trial, folder, expected) for trial in trials]
    return [
        f"policy.{trial.key}: {real.model_type!r} {line}" for trial, line in zip(trials, lines, strict=True) if line
    ]


def _problem(trial: Trial, folder: Path, expected: Found) -> str | None:
    try:
        found = trial.run(folder, trial.policy)
    except (NemoRLError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        kind = "" if isinstance(error, NemoRLError) else f"{type(error).__name__}: "
        return f"cannot run {trial.name}: {kind}{' '.join(str(error).split())[:MAX_REASON]}"
    problem = difference(found, expected)
    return None if problem is None else f"has other numbers {trial.name} than in Hugging Face: {problem}"


def trials_of(config: PolicyConfig) -> list[Trial]:
    if config.megatron_cfg.enabled:
        # Its model types are few, and tests compare each with Hugging Face in every layout.
        return [_engine_trial(config)] if config.generation.backend == EMBEDDED else []
    sizes, is_packed = config.parallel_sizes, config.sequence_packing.is_on
    trials = [Trial(name="padded in one worker", key="model_name", run=_in_worker, policy=_tiny(config, packed=False))]
    if is_packed:
        packed = _tiny(config, packed=True)
        trials.append(Trial(name="with packed rows", key=PACKED, run=_in_worker, policy=packed))
    axes = [
        (f"{axis} parallel", {f"{axis}_parallel_size": 2})
        for axis, size in (("tensor", sizes.tensor), ("context", sizes.context))
        if size > 1
    ]
    if len(axes) > 1:
        axes.append(("tensor and context parallel", {"tensor_parallel_size": 2, "context_parallel_size": 2}))
    for name, split in axes[-1:]:
        if "tensor_parallel_size" in split:
            split["sequence_parallel"] = sizes.sequence_parallel
        policy = _tiny(config, packed=is_packed, **split)
        trials.append(Trial(name=name, key=f"dtensor_cfg.{next(iter(split))}", run=_in_job, policy=policy))
    if config.generation.backend == EMBEDDED:
        trials.append(_engine_trial(config))
    trials.append(Trial(name="after saving", key="model_name", run=_saved, policy=_tiny(config, packed=False)))
    return trials


EMBEDDED = "torch"


def _engine_trial(config: PolicyConfig) -> Trial:
    policy = _tiny(config, packed=False)
    return Trial(name="in the embedded engine", key="generation.backend", run=_in_engine, policy=policy)


def _tiny(config: PolicyConfig, *, packed: bool, **split: Any) -> PolicyConfig:
    """Return the settings of a recipe that decide how its model is wrapped, for the tiny one."""
    return PolicyConfig(
        model_name=config.model_name,
        precision="float32",
        train_global_batch_size=len(LENGTHS),
        train_micro_batch_size=len(LENGTHS),
        max_total_sequence_length=max(LENGTHS),
        max_grad_norm=None,
        sequence_packing=config.sequence_packing.model_copy(
            update={
                "enabled": packed,
                "train_mb_tokens": TOKENS_OF_A_PASS,
                "logprob_mb_tokens": TOKENS_OF_A_PASS,
            }
        ),
        dtensor_cfg=config.dtensor_cfg.model_copy(
            update={
                "enabled": True,
                "cpu_offload": False,
                "tensor_parallel_size": 1,
                "context_parallel_size": 1,
                "replicate_size": 1,
                "sequence_parallel": False,
                **split,
            }
        ),
        optimizer=OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": STEP}),
    )


# ---- rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _CheckedRow:
    """A row that is computed in every way."""

    ids: list[int]
    images: Mapping[str, torch.Tensor]
    """Tensors of its images; empty where the model takes none."""


def _rows(config: PretrainedConfig) -> list[_CheckedRow]:
    """The same tokens everywhere; none is a special one but placeholders of images, which some rows have."""
    generator = torch.Generator().manual_seed(SEED)
    size, family = int(config.get_text_config().vocab_size), family_of(config)
    found = []
    for length, count in zip(LENGTHS, IMAGES, strict=True):
        ids = torch.randint(8, size, (length,), generator=generator).tolist()
        if family is None:
            found.append(_CheckedRow(ids=ids, images={}))
            continue
        for number in range(count):
            first = 1 + number * (SMALL_FEATURES + 1)
            ids[first : first + SMALL_FEATURES] = [family.image_token] * SMALL_FEATURES
        found.append(_CheckedRow(ids=ids, images=family.noise(count, generator)))
    return found


def _batch(rows: Sequence[_CheckedRow]) -> BatchedDataDict:
    lengths = torch.tensor([len(row.ids) for row in rows])
    ids_NT = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for number, row in enumerate(rows):
        ids_NT[number, : len(row.ids)] = torch.tensor(row.ids)
    column_T = torch.arange(ids_NT.shape[1])
    return BatchedDataDict(
        {
            "input_ids": ids_NT,
            "input_lengths": lengths,
            "token_mask": (column_T < lengths[:, None]) & (column_T > 0),
            "sample_mask": torch.ones(len(rows)),
            **{name: [row.images[name] for row in rows] for name in rows[0].images},
        }
    )


# ---- ways to compute


def _reference(folder: Path) -> Found:
    """Plain Hugging Face: eager attention, float64, every row by itself."""
    config = load_model_config(folder)
    model: PreTrainedModel = model_class(config).from_pretrained(
        str(folder),
        config=config,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    )
    model.eval()
    sites = HFSites(model)
    seen: dict[tuple[SiteKind, int | None], list[torch.Tensor]] = {}
    detach = [
        hook_point.attach(partial(_keep, seen.setdefault((hook_point.kind, hook_point.layer), [])))
        for hook_point in sites.hook_points
        if hook_point.kind in WATCHED
    ]
    logprobs, family = [], family_of(config)
    for row in _rows(config):
        ids = torch.tensor(row.ids)
        given = {"input_ids": ids[None]} if family is None else family.hugging_face_inputs(ids, row.images)
        logits = model(**given, use_cache=False).logits[0]
        taken = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        logprobs.append(torch.nn.functional.pad(taken, (1, 0)))
    for remove in detach:
        remove()
    loss = -torch.cat(logprobs).sum() / sum(length - 1 for length in LENGTHS)
    torch.autograd.backward([loss])
    return Found(
        logprobs=torch.cat(logprobs).detach(),
        sites={at: torch.cat(parts) for at, parts in seen.items()},
        loss=float(loss.detach()),
        gradients={name: weight.grad for name, weight in named_weights(model) if weight.grad is not None},
    )


def _keep(held: list[torch.Tensor], value: torch.Tensor) -> None:
    """Take up what a site of the reference shows of one row."""
    held.append(value.detach()[0].flatten(1))


class _Collector(HookObserver, SiteSink):
    """An observer of a worker that keeps what the log-probability pass shows of the watched sites."""

    def __init__(self) -> None:
        self.seen: dict[tuple[SiteKind, int | None], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Place among all tokens, and value, of each token."""

    def begin_call(self, phase: WorkerPass) -> _Collector | None:
        return self if phase is WorkerPass.PREV_LOGPROBS else None

    def end_call(self, phase: WorkerPass) -> None:
        """Check without writing anything."""

    def takes(self, kind: SiteKind, layer: int | None, direction: Direction) -> bool:
        return kind in WATCHED and direction is Direction.FORWARD

    def see(self, capture: Capture) -> None:
        if capture.rows is None or capture.split is not None:
            return
        table = capture.rows.table
        starts = torch.tensor([0, *LENGTHS]).cumsum(0)
        row_R = torch.tensor([int(key) for key in table.keys])[table.row_R]
        at = (capture.place.kind, capture.place.layer)
        values = capture.tokens().flatten(1).clone()
        self.seen.setdefault(at, []).append((starts[row_R] + table.position_R, values))


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankFound:
    found: Found
    seen: Mapping[tuple[SiteKind, int | None], list[tuple[torch.Tensor, torch.Tensor]]]
    is_writer: bool


def _in_worker(folder: Path, policy: PolicyConfig) -> Found:
    return _joined([_on_rank(RankSpec(rank=0, world_size=1), folder, policy)])


def _in_job(folder: Path, policy: PolicyConfig) -> Found:
    """The policy worker, every rank a process."""
    world = policy.parallel_sizes.replica_size
    ranks: list[Any] = run_job(world, _on_rank_of_job, folder, policy, timeout_s=TIMEOUT_S)
    return _joined([_changed(rank, torch.from_numpy) for rank in ranks])


def _on_rank_of_job(spec: RankSpec, folder: Path, policy: PolicyConfig) -> _RankFound:
    """Run `_on_rank`, and return arrays: they outlive their process, and tensors would be shared with it."""
    return _changed(_on_rank(spec, folder, policy), lambda tensor: tensor.detach().numpy())


def _changed(rank: _RankFound, change: Callable[[Any], Any]) -> _RankFound:
    found = Found(
        logprobs=change(rank.found.logprobs),
        loss=rank.found.loss,
        gradients={name: change(grad) for name, grad in rank.found.gradients.items()},
    )
    seen = {at: [(change(place), change(value)) for place, value in parts] for at, parts in rank.seen.items()}
    return _RankFound(found=found, seen=seen, is_writer=rank.is_writer)


def _on_rank(spec: RankSpec, folder: Path, policy: PolicyConfig) -> _RankFound:
    """(collective) Log-probabilities in evaluation mode, then an update in training mode."""
    policy = policy.model_copy(update={"model_name": str(folder)})
    collector = _Collector()
    with worker_of_job(
        spec,
        policy,
        uses_gpu=False,
        num_threads=torch.get_num_threads(),
        timeout_s=TIMEOUT_S,
        num_steps=1,
        seed=SEED,
        hook_observers=[collector],
    ) as worker:
        return _RankFound(
            found=_passes(worker, policy), seen=collector.seen, is_writer=worker.layout.is_writer(spec.rank)
        )


def _passes(worker: PolicyWorker, policy: PolicyConfig) -> Found:
    batch = _batch(_rows(load_model_config(policy.model_name)))
    batch["keys"] = [str(number) for number in range(batch.size)]
    layout = ParallelLayout.of_policy(policy, world_size=worker.world_size)
    plan = plan_train(list(LENGTHS), [len(LENGTHS)], policy, layout=layout).for_rank(0)
    logprobs_NT = worker.get_logprobs(batch, plan=plan)
    before = {name: weight.clone() for name, weight in worker.engine.full_weights()}
    trained = worker.train(batch, NLLLoss(), plan=plan)
    after = worker.engine.full_weights()
    return Found(
        logprobs=torch.cat([logprobs_NT[number, :length] for number, length in enumerate(LENGTHS)]),
        loss=trained.loss[0],
        gradients={name: (before[name] - weight).double() / STEP for name, weight in after},
    )


def _joined(ranks: Sequence[_RankFound]) -> Found:
    """Log-probabilities of the rank that speaks for the others, and sites of all tokens from whichever has them."""
    speaker = next(rank.found for rank in ranks if rank.is_writer)
    sites: dict[tuple[SiteKind, int | None], torch.Tensor] = {}
    for rank in ranks:
        for at, parts in rank.seen.items():
            for place_R, value_Rh in parts:
                held = sites.setdefault(at, torch.full((sum(LENGTHS), value_Rh.shape[1]), torch.nan))
                held[place_R] = value_Rh.float()
    return Found(logprobs=speaker.logprobs, sites=sites, loss=speaker.loss, gradients=speaker.gradients)


def _in_engine(folder: Path, policy: PolicyConfig) -> Found:
    """The embedded engine, which decodes the rest of each row after its prompt."""
    rows = _rows(load_model_config(folder))
    engine = TorchEngine(
        load_causal_lm(folder),
        tokenizer=None,
        max_total_length=max(LENGTHS),
        max_batch_size=len(rows),
        weight_version=0,
    )
    output = engine.generate(
        GenerationRequest(
            prompt_ids=tuple(tuple(row.ids[:prompt]) for row, prompt in zip(rows, PROMPTS, strict=True)),
            seeds=tuple(range(len(rows))),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=max(LENGTHS), stop_token_ids=()),
            forced=tuple(tuple(row.ids[prompt:]) for row, prompt in zip(rows, PROMPTS, strict=True)),
            images=tuple(PromptImages.of(row.images) if row.images else None for row in rows),
        )
    )
    logprobs = torch.full((sum(LENGTHS),), torch.nan)
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    parts = torch.split(output.logprobs, output.lengths.tolist())
    for (start, stop), prompt, part in zip(pairwise(starts), PROMPTS, parts, strict=True):
        logprobs[start + prompt : stop] = part
    engine.shutdown()
    return Found(logprobs=logprobs)


def _saved(folder: Path, policy: PolicyConfig) -> Found:
    """Written as checkpoints are, read as transformers does.

    Raises:
        UserError: transformers would make up some of the weights, or finds some that it does not know.
    """
    model = load_causal_lm(folder)
    weights = dict(named_weights(model))
    infos = {name: TensorInfo(shape=tuple(weight.shape), dtype="float32") for name, weight in weights.items()}
    target = folder.parent / "saved"
    write_folder(target, ModelDescription(config=model.config, infos=infos), weights.items())
    again, report = model_class(model.config).from_pretrained(
        str(target), output_loading_info=True, local_files_only=True
    )
    wrong = sorted([*report["missing_keys"], *report["unexpected_keys"]])
    if wrong:
        raise UserError(f"transformers does not know {len(wrong)} weights by the names in our files, first {wrong[0]}")
    held = dict(named_weights(again))
    changed = [name for name, weight in weights.items() if not torch.equal(weight, held[name].to(weight.dtype))]
    if changed:
        raise UserError(f"transformers reads other values of {changed[0]} from our files")
    return Found(logprobs=torch.full((sum(LENGTHS),), torch.nan))


# ---- comparison


def difference(found: Found, expected: Found) -> str | None:
    """Return what differs first, or None. What one side has not computed (NaN) is not compared."""
    is_there_R = ~found.logprobs.isnan()
    apart = (found.logprobs.double() - expected.logprobs)[is_there_R].abs()
    if len(apart) and not float(apart.max()) <= LIMIT:
        at = _first_site(found, expected)
        where = f"first at {at}" if at is not None else "all sites that can be seen agree"
        return f"log-probabilities differ by up to {float(apart.max()):.2g} ({where})"
    if found.loss is not None and expected.loss is not None and not abs(found.loss - expected.loss) <= LIMIT:
        return (
            f"the training pass has the loss {found.loss:.5g}, and {expected.loss:.5g} in evaluation mode; something "
            "in the model is random in training"
        )
    return _first_gradient(found, expected)


def _first_site(found: Found, expected: Found) -> str | None:
    for kind, layer in sorted(expected.sites, key=lambda at: execution_order(at[0], at[1], Direction.FORWARD)):
        mine, other = found.sites.get((kind, layer)), expected.sites[kind, layer]
        if mine is None or mine.shape != other.shape:
            continue
        is_there_R = ~mine.isnan().any(dim=1)
        apart = float((mine - other)[is_there_R].norm() / other[is_there_R].norm().clamp(min=1e-9))
        if not apart <= LIMIT:
            of_layer = "" if layer is None else f" of layer {layer}"
            return f"{kind.value}{of_layer}, relative difference {apart:.2g}"
    return None


def _first_gradient(found: Found, expected: Found) -> str | None:
    if not found.gradients or not expected.gradients:
        return None
    norm = float(torch.stack([grad.norm() for grad in expected.gradients.values()]).norm())
    for name, grad in expected.gradients.items():
        apart = float((found.gradients[name] - grad).norm())
        if not apart <= LIMIT * max(float(grad.norm()), LIMIT * norm, LIMIT):
            return f"the gradient of {name} differs by {apart / max(float(grad.norm()), 1e-9):.2g} of its norm"
    return None


# ---- around a check


@contextmanager
def _untouched() -> Iterator[None]:
    """Random numbers of this process go on as if nothing had been drawn, and its errors are told without a rank."""
    hook = sys.excepthook
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        # Each process group puts another prefix before what the hook says.
        sys.excepthook = hook


def _digest(real: PretrainedConfig, trials: Sequence[Trial]) -> str:
    """Return what the outcome depends on: the config, its classes, the library, the versions and the settings."""
    given = {name: value for name, value in real.to_dict().items() if name not in ("_name_or_path", "dtype")}
    source = Path(inspect.getfile(type(real))).parent
    folders = (source, *(Path(place) for place in nemo_rl.models.__path__), Path(__file__).parent)
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    settings = [trial.policy.model_dump(mode="json", exclude={"model_name"}) for trial in trials]
    parts = {
        "config": given,
        "trials": [[trial.name, setting] for trial, setting in zip(trials, settings, strict=True)],
        "versions": dict(package_versions()),
        "files": [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
