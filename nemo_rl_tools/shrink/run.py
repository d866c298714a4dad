"""`shrink`: a recipe for a cluster, made small and run on this machine; called by `nemo-rl shrink`.

shrink
  |- load_config                   every rule, on the real sizes                       (config)
  |- check_planned_model_fits      the real model in the real layout                   (models.policy.fit)
  |- small_layout                  two ranks along each axis                           (changes)
  |- write_small_model             random weights of the family, a tokenizer           (model)
  |- changes_of, write_recipe      what else is other here, as a recipe                (changes)
  |- run                           the very same trainer                               (algorithms.run)
  `- checks_of                     against one process, engines, the checkpoint

The shrunk recipe is a child of the user's recipe; `nemo-rl train DIR/shrunk.yaml` is the run.
Float32 on one machine leaves no reason for a difference but a wrong layout: the same rows in one process must give the
same log-probabilities, loss, gradient norm and weights, engines must sample with the trainer's weights, and the
checkpoint must hold them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from nemo_rl.algorithms.kept_steps.folder import StepsFolder
from nemo_rl.algorithms.run import run
from nemo_rl.config import yaml_text
from nemo_rl.config.compose import COMMAND_LINE, apply_overrides, compose
from nemo_rl.config.load import load_config
from nemo_rl.config.rules.policy import packing_decided
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.schema_walk import default_tree, lookup, place_of, put
from nemo_rl.data.datasets import raw_prompts
from nemo_rl.errors import RunFolderError, boundary
from nemo_rl.models.adapters.folder import is_adapter_folder, read_adapter
from nemo_rl.models.adapters.lora import adapted_layers, adapter_infos
from nemo_rl.models.hf.loading import build_meta_model, load_causal_lm, named_weights
from nemo_rl.models.hf.tiny_model import HIDDEN, WIDE, write_small_model
from nemo_rl.models.policy.fit import check_planned_model_fits
from nemo_rl.models.weight_sync.weights_digest import digest_weights
from nemo_rl.utils.trackers import read_metrics
from nemo_rl_tools.known_models import planned_model_config
from nemo_rl_tools.shrink.changes import TEACHER, Changes, ShrinkChange, changes_of, small_layout, teacher_sizes
from nemo_rl_tools.step_replay.chain import ReplayProblem, ReplayRequest, checkpoints_of
from nemo_rl_tools.step_replay.replay import replay_step
from nemo_rl_tools.verdict import Verdict

__all__ = ["SHRUNK", "ShrinkReport", "ShrinkRequest", "shrink", "write_recipe"]

GIVEN, SHRUNK = "recipe.yaml", "shrunk.yaml"
DELETES = "~"


def write_recipe(folder: Path, recipe: Path, overrides: Sequence[str], changes: Changes) -> MasterConfig:
    """Write both files and load the small one, so that every rule has checked it.

    Raises:
        ConfigError: the small recipe breaks a rule.
        RunFolderError: the folder cannot be written.
    """
    given = {"defaults": str(recipe.absolute()), **_overridden(recipe, overrides)}
    _write(folder / GIVEN, [f"{recipe.name} with what was set over it."], given)
    head = f"What `nemo-rl shrink` changed. To run it: nemo-rl train {folder / SHRUNK}"
    why = [f"{change.key}: {change.why}" for change in changes.found]
    _write(folder / SHRUNK, [head, *why], {"defaults": GIVEN, **changes.tree()})
    return load_config(folder / SHRUNK)


def _overridden(recipe: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the overrides of a command line as a recipe; a deleted key has its default again."""
    composed, tree = compose(recipe), dict[str, Any]()
    apply_overrides(composed, overrides)
    for path, layer in composed.layers.items():
        if layer is COMMAND_LINE:
            put(tree, path, lookup(composed.tree, path)[1])
    for text in overrides:
        path = tuple(text.removeprefix(DELETES).split("."))
        if not text.startswith(DELETES) or lookup(composed.tree, path)[0]:
            continue
        if place_of(path).is_free:
            put(tree, path[:-1], {"_override_": True, **lookup(composed.tree, path[:-1])[1]})
        else:
            put(tree, path, lookup(default_tree(), path)[1])
    return tree


def _write(path: Path, head: Sequence[str], tree: Mapping[str, Any]) -> None:
    text = yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True, width=116)
    with boundary(RunFolderError, f"{path}: cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        yaml_text.write_recipe(path, "".join(f"# {line}\n" for line in head) + text)


WORKERS_PER_CPU, MAX_WORKERS = 4, 8
"""Processes of the policy that a core bears in a run of so few numbers, and the most of them anywhere."""
MODEL = "model"
TEACHER_SEED = 1
"""Seed of a teacher's weights: other ones than the model's, from which it would learn nothing."""
PROMPTS_READ = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrinkRequest:
    """The request to shrink one recipe."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    cpus: int = 2
    """Cores of this machine that the run may use."""
    out: Path
    """Folder of the small recipe, its model and its run."""
    steps: int = 3
    is_run: bool = True
    model_config: Path | None = None
    """`config.json` of the real model, in place of a folder or a known name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrinkCheck:
    """One question about the run."""

    name: str
    holds: bool | None
    """The answer of the check, or None where there was nothing to look at."""
    text: str
    """The finding, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrinkReport:
    """The report of one shrunk recipe."""

    recipe: Path
    out: Path
    model: str
    """The real one and the small one, for people."""
    layout: str
    reduced: tuple[str, ...]
    changes: tuple[ShrinkChange, ...]
    notes: tuple[str, ...] = ()
    stages: Mapping[str, float] | None = None
    """Seconds of each stage over all steps; None: it was not run."""
    steps: int = 0
    checks: tuple[ShrinkCheck, ...] = ()
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        return Verdict.MISMATCH if any(check.holds is False for check in self.checks) else Verdict.PASS

    def lines(self) -> Iterator[str]:
        yield f"shrink of {self.recipe}: {self.layout}"
        yield f"  model: {self.model}"
        for text in self.reduced:
            yield f"  not kept: {text}"
        for text in self.notes:
            yield f"  note: {text}"
        yield f"changed ({len(self.changes)} keys)"
        for why in dict.fromkeys(change.why for change in self.changes):
            yield f"  {why}: {', '.join(change.text for change in self.changes if change.why == why)}"
        if self.stages is not None:
            yield f"stages ({self.steps} steps)"
            for name, seconds in self.stages.items():
                yield f"  {name:<22} ran    {seconds:.2f} s"
        if self.checks:
            yield "checks"
        for check in self.checks:
            word = "-" if check.holds is None else "ok" if check.holds else "FAILS"
            yield f"  {check.name:<22} {word:<6} {check.text}"
        again = f"nemo-rl train {self.out / 'shrunk.yaml'}"
        if self.stages is None:
            yield f"written, not run; to run it: {again}"
        else:
            yield f"{self.verdict.label} in {self.seconds:.0f} s; again: {again}"

    def as_record(self) -> dict[str, object]:
        return {
            "recipe": str(self.recipe),
            "out": str(self.out),
            "model": self.model,
            "layout": self.layout,
            "not_kept": list(self.reduced),
            "notes": list(self.notes),
            "changes": [asdict(change) for change in self.changes],
            "stages": self.stages,
            "steps": self.steps,
            "checks": [asdict(check) for check in self.checks],
            "verdict": self.verdict.label,
            "seconds": self.seconds,
        }


def shrink(request: ShrinkRequest, *, console: Console) -> ShrinkReport:
    """Check the real recipe, write a small one, run it and check the run.

    Raises:
        UserError: the recipe is at fault, as it is or made small; the message is that of the rule or the run.
        NemoRLError: a worker or the data plane of the small run failed.
    """
    started = time.monotonic()
    config = packing_decided(load_config(request.recipe, request.overrides), fits=lambda _: True)
    real = planned_model_config(config.policy.model_name, given=request.model_config)
    check_planned_model_fits(real, config.policy)
    notes = _prompt_notes(config)
    most = min(MAX_WORKERS, WORKERS_PER_CPU * request.cpus)
    layout = small_layout(config.policy.parallel_sizes, config.cluster.num_workers, max_workers=most)
    hidden = WIDE if config.policy.generation.backend == "vllm" else HIDDEN
    model = write_small_model(request.out / MODEL, real, layout.sizes, real_sizes=layout.real, hidden=hidden)
    if config.loss_fn.distillation.enabled:
        sizes = teacher_sizes(config)
        write_small_model(request.out / TEACHER, real, sizes, real_sizes=sizes, seed=TEACHER_SEED)
    changes = changes_of(
        config, layout, steps=request.steps, out=request.out, model=model.folder, num_layers=model.num_layers
    )
    small = write_recipe(request.out, request.recipe, request.overrides, changes)
    report = ShrinkReport(
        recipe=request.recipe,
        out=request.out,
        model=f"{config.policy.model_name} ({real.model_type}, {real.num_hidden_layers} layers) fits its layout; here "
        f"{model.num_layers} layers, {model.num_parameters} parameters, random",
        layout=layout.text,
        reduced=layout.reduced,
        changes=tuple(changes.found),
        notes=notes,
    )
    if not request.is_run:
        return report
    run(small, console=console)
    return replace(
        report,
        stages=stages_of(small),
        steps=request.steps,
        checks=checks_of(small, steps=request.steps),
        seconds=time.monotonic() - started,
    )


def _prompt_notes(config: MasterConfig) -> tuple[str, ...]:
    """Open the files of prompts that are here, so that a wrong key shows; raise a DatasetError of theirs."""
    notes = []
    for key, source in config.data.sections.items():
        if source.data_path is None:
            continue
        if source.data_path.exists():
            list(islice(raw_prompts(source, key), PROMPTS_READ))
            notes.append(f"{key}: {source.data_path} was opened, but is not what the small model reads")
        else:
            notes.append(f"{key}: {source.data_path} is not here and was not looked at")
    return tuple(notes)


LOG = "log"
"""The stage that writes readable rollouts."""
ENGINE_BOUNDS: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.25}
"""Bounds of the mean of exp(|log-probability of the trainer - of the engine|) above 1, by the engine's precision."""
ERROR_METRIC, NORM_METRIC = "train/token_mult_prob_error", "train/grad_norm"


def stages_of(config: MasterConfig) -> dict[str, float]:
    """Return the seconds of every stage of the run, over all steps."""
    seconds: dict[str, float] = {}
    for row in _rows(config):
        for name, value in row.items():
            stage = name.removeprefix("timing/").removesuffix("_s")
            if name.startswith("timing/") and stage not in ("step", "keep_step"):
                seconds[stage] = seconds.get(stage, 0.0) + value
    return seconds


def checks_of(config: MasterConfig, *, steps: int) -> tuple[ShrinkCheck, ...]:
    """Return all checks, in the order of what they look at."""
    rows = _rows(config)
    return (
        _every_stage(config, rows, steps=steps),
        _gradients(rows),
        _one_process(config, steps=steps),
        _engines(config, rows),
        _checkpoint(config, steps=steps),
    )


def _rows(config: MasterConfig) -> list[dict[str, float]]:
    return [row for row in read_metrics(config.logger.log_dir / "metrics.jsonl") if "timing/step_s" in row]


def _every_stage(config: MasterConfig, rows: Sequence[Mapping[str, float]], *, steps: int) -> ShrinkCheck:
    kept = StepsFolder(config.logger.log_dir).all()
    expected = [*(kept[-1].read().run.stages if kept else ()), "refit"]
    if config.logger.num_rollouts_to_log == 0 and LOG in expected:
        # It is declared in every run, and has nothing to write in this one.
        expected.remove(LOG)
    missing = [
        f"{stage} of step {number}"
        for number, row in enumerate(rows, start=1)
        for stage in expected
        if f"timing/{stage}_s" not in row
    ]
    if len(rows) != steps:
        missing.append(f"{steps - len(rows)} of {steps} steps")
    text = f"missing: {', '.join(missing)}" if missing else f"{len(rows)} steps: {', '.join(expected)}"
    return ShrinkCheck(name="every stage", holds=not missing, text=text)


def _gradients(rows: Sequence[Mapping[str, float]]) -> ShrinkCheck:
    norms = [row[NORM_METRIC] for row in rows if NORM_METRIC in row]
    text = f"norms {', '.join(f'{norm:.3g}' for norm in norms)}" if norms else "no step trained a row"
    return ShrinkCheck(name="gradients", holds=any(norm > 0 for norm in norms), text=text)


def _one_process(config: MasterConfig, *, steps: int) -> ShrinkCheck:
    """Check every step again in one process, from the initial model."""
    name = "one process"
    workers = config.cluster.num_workers
    if workers == 1:
        return ShrinkCheck(name=name, holds=None, text="the run had one worker")
    try:
        report = replay_step(ReplayRequest(run=config.logger.log_dir, step=steps, in_one_process=True))
    except ReplayProblem as problem:
        return ShrinkCheck(name=name, holds=False, text=str(problem))
    first = report.first
    if first is not None:
        return ShrinkCheck(name=name, holds=False, text=f"{first.label} is another: {first.difference}")
    if report.verdict in (Verdict.PASS, Verdict.INCOMPLETE):
        return ShrinkCheck(name=name, holds=True, text=f"{workers} workers give its numbers in {steps} steps")
    return ShrinkCheck(name=name, holds=False, text=f"the replay is {report.verdict.label}")


def _engines(config: MasterConfig, rows: Sequence[Mapping[str, float]]) -> ShrinkCheck:
    name = "engines"
    if config.grpo.use_generation_logprobs_as_prev:
        return ShrinkCheck(name=name, holds=None, text="grpo.use_generation_logprobs_as_prev: nothing to compare with")
    errors = [row[ERROR_METRIC] - 1 for row in rows if ERROR_METRIC in row]
    if not errors:
        return ShrinkCheck(name=name, holds=None, text=f"no {ERROR_METRIC} was logged")
    bound = ENGINE_BOUNDS[config.policy.generation.precision or config.policy.precision]
    text = f"log-probabilities of their tokens are {max(errors):.2g} from the trainer's, at most {bound:g}"
    return ShrinkCheck(name=name, holds=max(errors) <= bound, text=text)


def _checkpoint(config: MasterConfig, *, steps: int) -> ShrinkCheck:
    """Check that the checkpoint of the last step is whole and holds the weights with which the step ended."""
    name = "checkpoint"
    if not config.checkpointing.enabled:
        return ShrinkCheck(name=name, holds=None, text="checkpointing.enabled is false")
    found = [
        checkpoint
        for checkpoint in checkpoints_of(config.checkpointing, config.logger.log_dir)
        if checkpoint.step == steps
    ]
    if not found:
        return ShrinkCheck(name=name, holds=False, text=f"there is none of step {steps}")
    damage = found[0].manifest.damage(found[0].path)
    if damage is not None:
        return ShrinkCheck(name=name, holds=False, text=damage)
    outcome = StepsFolder(config.logger.log_dir).all()[-1].read().outcome
    kept = None if outcome is None else outcome.weights
    if kept is None:
        return ShrinkCheck(name=name, holds=None, text="the last step kept no digest of its weights")
    saved = digest_weights(_trained_weights(config, found[0].weights))
    apart = kept.distance(saved)
    text = f"holds the weights of step {steps}"
    if apart:
        text = f"its weights are {apart:.2g} of their norm from those of step {steps}"
    return ShrinkCheck(name=name, holds=apart == 0, text=text)


def _trained_weights(config: MasterConfig, folder: Path) -> Iterable[tuple[str, torch.Tensor]]:
    if not is_adapter_folder(folder):
        return named_weights(load_causal_lm(folder))
    lora, model = config.policy.lora, build_meta_model(config.policy.model_name)
    return read_adapter(folder, adapter_infos(adapted_layers(model, lora), lora), lora, base=None).items()
