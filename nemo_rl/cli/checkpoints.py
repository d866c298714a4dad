"""`nemo-rl eval` and `nemo-rl export`: measure the weights of a checkpoint, or copy them into their own folder.

Invariant: no file of a checkpoint is used that differs from what its manifest says.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_rl.config.backends import LoraConfig
from nemo_rl.config.base import is_url
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.yaml_text import YamlProblem, masked, parse_yaml
from nemo_rl.errors import CheckpointError
from nemo_rl.utils import interrupt
from nemo_rl.utils.checkpoint import STEP, WEIGHTS, Checkpoint, checkpoint_paths, read_checkpoint
from nemo_rl.utils.console import make_console
from nemo_rl.utils.exits import machine_problem
from nemo_rl.utils.files import give_usual_modes, read_plain_text, write_text
from nemo_rl.utils.memory import package_versions
from nemo_rl.utils.object_store import ObjectStore
from nemo_rl.utils.remote_checkpoints import RemoteCheckpoints

if TYPE_CHECKING:
    from nemo_rl.experience.evaluation.evaluator import Evaluator, ValidationResult

__all__ = [
    "FoundWeights",
    "evaluate",
    "export",
    "find_weights",
    "for_evaluation",
    "measure",
    "open_weights",
]

ADAPTER_CONFIG, MERGED = "adapter_config.json", "merged_model"
LOST_WORTH_SAYING = 1e-3
"""Share of an update that a merged export may lose without a word."""
RESULT_FILE, SAMPLES_FILE = "evaluation.json", "samples.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundWeights:
    """Weights that can be sampled from, and where they are from."""

    model: str
    """Folder, or name on the hub; empty where only an adapter is evaluated, on the recipe's model."""
    adapter: Path | None = None
    step: int
    """0 for what is no checkpoint of a run."""
    state: Mapping[str, object] = field(default_factory=dict)
    """State that the checkpoint holds."""
    url: str | None = None
    """URL from which it was downloaded."""


def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="a checkpoint step_N or a run, also by URL, a model folder or a model's name"
        ),
    ],
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file, also config.yaml of a run")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="such as evaluation.num_samples=8")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="of a run; default: the newest")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="K", min=1, help="first K prompts of each set")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="for result, samples and logs")] = Path(
        "results/eval"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Sample the held-out prompts of RECIPE with the weights of CHECKPOINT, and measure the responses.

    Without a change of settings a checkpoint of step N gets the numbers of the run's validation after step N.

    Exit code: 0, 1 where an engine or the reward fails, 2 for what can be mended.
    """
    console = make_console()
    interrupt.install()
    weights = find_weights(checkpoint, step)
    config = for_evaluation(load_config(recipe, list(overrides or ())), weights, out)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.cluster.threads_per_worker))
    began = time.monotonic()
    result = measure(config, weights, limit, out, report=lambda line: None if as_json else console.print(line))
    record = _record(config, weights, result, seconds=time.monotonic() - began)
    write_text(out / RESULT_FILE, json.dumps(record, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(record, indent=1))
        return
    from nemo_rl.experience.evaluation.evaluator import evaluation_lines  # noqa: PLC0415 - imports torch

    for line in evaluation_lines(result.sets, confidence=config.evaluation.confidence):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"result {out / RESULT_FILE}, samples {out / SAMPLES_FILE}")


def find_weights(given: str, step: int | None) -> FoundWeights:
    """Return what a checkpoint, a run, a model folder or a model's name stands for.

    Args:
        step: checkpoint of a run; None takes the newest.

    Raises:
        CheckpointError: there is none, not this one, or it is damaged.
    """
    place = Path(given)
    if is_url(given):
        return _of_checkpoint(find_checkpoint(given, step=step))
    if (place / ADAPTER_CONFIG).is_file():
        return FoundWeights(model="", adapter=place, step=0)
    if place.is_dir() and not (place / "config.json").is_file():
        return _of_checkpoint(find_checkpoint(place, step=step))
    if step is not None:
        raise CheckpointError(f"--step {step}: {given} is no run and holds no checkpoints; leave it out")
    return FoundWeights(model=given, step=0)


def _of_checkpoint(found: Checkpoint) -> FoundWeights:
    if (found.weights / ADAPTER_CONFIG).is_file():
        return FoundWeights(model="", adapter=found.weights, step=found.step, state=found.state, url=found.url)
    return FoundWeights(model=str(found.weights), step=found.step, state=found.state, url=found.url)


def for_evaluation(config: MasterConfig, weights: FoundWeights, out: Path) -> MasterConfig:
    """Return the recipe with the weights that are evaluated; an adapter is served as `policy.lora.serve` says."""
    lora, model = LoraConfig(), weights.model
    if weights.adapter is not None:
        # torch takes seconds to import, and whole models need none here.
        from nemo_rl.models.adapters.folder import merge_folder, policy_at  # noqa: PLC0415
        from nemo_rl.models.hf.loading import DTYPES, local_folders  # noqa: PLC0415

        # The base is read: its folder in place of a name on the hub.
        config = config.model_copy(update={"policy": local_folders(config.policy)})
        model, lora = config.policy.model_name, policy_at(config.policy, weights.adapter).lora
        if config.policy.lora.enabled and config.policy.lora.serve == "merged":
            dtype = DTYPES[config.policy.generation.precision or config.policy.precision]
            lora, folder = LoraConfig(), out / MERGED
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(weights.adapter, folder)
            merge_folder(folder, base=Path(model), dtype=dtype)
            tokenizer = config.policy.tokenizer.model_copy(update={"name": config.policy.tokenizer.name or model})
            policy = config.policy.model_copy(update={"tokenizer": tokenizer})
            config, model = config.model_copy(update={"policy": policy}), str(folder)
    policy = config.policy.model_copy(update={"model_name": model, "lora": lora})
    logger = config.logger.model_copy(update={"log_dir": out})
    return config.model_copy(update={"policy": policy, "logger": logger})


@contextmanager
def open_weights(config: MasterConfig, weights: FoundWeights, *, report: Callable[[str], None]) -> Iterator[Evaluator]:
    """Start what samples from the weights (`open_evaluator`), whose config is from `for_evaluation`; torch and Ray are
    imported only here."""
    from nemo_rl.algorithms.processes import worker_forks  # noqa: PLC0415

    with worker_forks(config) as forks:
        from nemo_rl.algorithms.run import open_evaluator  # noqa: PLC0415
        from nemo_rl.algorithms.run_folder import run_start  # noqa: PLC0415

        now = run_start(weights.state, where=weights.adapter or weights.model)
        with open_evaluator(config, report=report, forks=forks, now=now) as evaluator:
            yield evaluator


def measure(
    config: MasterConfig, weights: FoundWeights, limit: int | None, out: Path, *, report: Callable[[str], None]
) -> ValidationResult:
    """Sample the held-out prompts of the config and measure the responses, which go to `samples.jsonl` in `out`.

    Args:
        limit: most prompts of each set; None takes all.
        report: gets lines for the person at the terminal.
    """
    with open_weights(config, weights, report=report) as evaluator:
        from nemo_rl.experience.evaluation.evaluator import EvaluationTask, SampleFile  # noqa: PLC0415

        samples = SampleFile(path=out / SAMPLES_FILE, max_rows=None)
        result = evaluator.evaluate(EvaluationTask(step=weights.step, version=None, max_prompts=limit, samples=samples))
    for line in result.printed:
        report(f"reward: {line}")
    return result


def _record(
    config: MasterConfig, weights: FoundWeights, result: ValidationResult, *, seconds: float
) -> dict[str, object]:
    """Return all that is needed to quote the numbers, or to get them again."""
    return {
        "checkpoint": weights.url or str(weights.adapter or weights.model),
        "step": weights.step,
        "sets": {name: found.as_record() for name, found in result.sets.items()},
        "seed": config.grpo.seed,
        "evaluation": config.evaluation.model_dump(mode="json"),
        "generation": config.policy.generation.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json", exclude={"train"}),
        "env": masked(config.env.model_dump(mode="json")),
        "packages": dict(package_versions()),
        "seconds": round(seconds, 3),
    }


class Dtype(StrEnum):
    """Dtypes of exported weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="log folder of a run, or its folder or URL of checkpoints")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder to make")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="default: the newest")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="default: that of the model which the run started from")
    ] = None,
    merged: Annotated[
        bool | None,
        typer.Option("--merged/--adapter", help="of a run with policy.lora: the whole model, or the adapter (default)"),
    ] = None,
    base: Annotated[
        Path | None, typer.Option("--base", metavar="DIR", help="model under the adapter; default: where it was")
    ] = None,
) -> None:
    """Copy weights, config and tokenizer of a checkpoint to DIR, which transformers and vLLM read.

    Every file is compared with the checkpoint's manifest before it is written in another dtype. Of a run with
    policy.lora DIR is an adapter in peft's format, or with --merged the whole model.

    Exit code: 0, or 2 where there is no such checkpoint, DIR exists, or a weight is too large for the dtype.
    """
    # torch takes seconds to import, and other commands need none.
    from nemo_rl.algorithms.run_folder import exported_dtype, model_dtype  # noqa: PLC0415
    from nemo_rl.models.adapters.folder import is_adapter_folder  # noqa: PLC0415
    from nemo_rl.models.hf.loading import DTYPES  # noqa: PLC0415
    from nemo_rl.models.hf.writing import cast_folder  # noqa: PLC0415

    checkpoint = find_checkpoint(run, step=step)
    if is_adapter_folder(checkpoint.weights):
        _export_adapter(checkpoint, out, dtype=dtype, merged=bool(merged), base=base)
        return
    if merged is not None or base is not None:
        raise CheckpointError(f"{run}: holds whole models and no adapter; leave --merged, --adapter and --base out")
    stored = model_dtype(checkpoint.weights)
    wanted = exported_dtype(checkpoint.state) if dtype is None else dtype.value
    is_cast = wanted in DTYPES and wanted != stored
    export_weights(checkpoint, out, change=partial(cast_folder, dtype=DTYPES[wanted]) if wanted and is_cast else None)
    how = f"{wanted if is_cast else stored}" + ("" if wanted in DTYPES else ", as it was saved")
    make_console().print(f"step {checkpoint.step} of {run} is in {out} ({how})", soft_wrap=True)


def _export_adapter(checkpoint: Checkpoint, out: Path, *, dtype: Dtype | None, merged: bool, base: Path | None) -> None:
    from nemo_rl.algorithms.run_folder import exported_dtype  # noqa: PLC0415 - imports torch
    from nemo_rl.models.adapters.folder import base_folder_of, merge_folder  # noqa: PLC0415
    from nemo_rl.models.hf.loading import DTYPES  # noqa: PLC0415

    console = make_console()
    if not merged:
        if dtype is not None or base is not None:
            raise CheckpointError(
                "--dtype, --base: an adapter is copied as it was saved; add --merged, or leave them out"
            )
        export_weights(checkpoint, out)
        console.print(f"the adapter of step {checkpoint.step} is in {out}, for peft and vLLM", soft_wrap=True)
        return
    under = base or Path(base_folder_of(checkpoint.weights))
    if not under.is_dir():
        raise CheckpointError(f"{under}: the model under the adapter is not there; name its folder with --base")
    found = exported_dtype(checkpoint.state) if dtype is None else dtype.value
    wanted = found if found in DTYPES else "float32"
    lost = list[float]()
    export_weights(
        checkpoint, out, change=lambda folder: lost.append(merge_folder(folder, base=under, dtype=DTYPES[wanted]))
    )
    console.print(f"step {checkpoint.step} merged into {under} is in {out} ({wanted})", soft_wrap=True)
    if lost[0] > LOST_WORTH_SAYING:
        console.print(
            f"rounding to {wanted} has lost {lost[0]:.1%} of the update; --adapter, or --dtype float32, keeps it",
            soft_wrap=True,
        )


CHECKPOINTS, RECIPE_FILE = "checkpoints", "config.yaml"
"""Folder in `logger.log_dir`, unless a recipe has named another, and the resolved recipe."""


def find_checkpoint(place: Path | str, *, step: int | None = None) -> Checkpoint:
    """Return the checkpoint that `place` is or holds, its weights on this machine and compared with the manifest.

    Args:
        place: a folder `step_N`, a folder of such, the log folder of a run, or the URL of one of the first two.
        step: which one; None takes the newest.

    Raises:
        CheckpointError: there is none, not this one, or it is damaged.
    """
    url = str(place) if is_url(place) else _url_of_run(Path(place))
    if url is not None:
        return _at_url(url, step)
    path = _chosen(Path(place), step)
    try:
        checkpoint = read_checkpoint(path)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not a complete checkpoint: {error}") from error
    damage = checkpoint.manifest.only(f"{WEIGHTS}/").damage(path)
    if damage is not None:
        raise CheckpointError(f"{path}: {damage}; take another checkpoint")
    return checkpoint


def export_weights(checkpoint: Checkpoint, out: Path, *, change: Callable[[Path], None] | None = None) -> Path:
    """Copy the Hugging Face folder of a checkpoint to `out`, which appears when it is whole.

    Args:
        change: of the copy, once it is known to be what was saved.

    Raises:
        CheckpointError: `out` exists, or cannot be written, or the copy differs from the manifest.
    """
    if out.exists():
        raise CheckpointError(f"{out}: exists already; name a folder that does not")
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(checkpoint.weights, partial)
        damage = checkpoint.manifest.only(f"{WEIGHTS}/", is_relative=True).damage(partial)
        if damage is not None:
            raise CheckpointError(f"{out}: the copy is not what was saved: {damage}")
        if change is not None:
            change(partial)
        # safetensors writes for the owner alone, and copies have the modes of the checkpoint.
        give_usual_modes(partial)
        partial.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {machine_problem(error) or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _url_of_run(log_dir: Path) -> str | None:
    """Return the URL of the checkpoints of a run; None where they lie in a folder."""
    if not (log_dir / RECIPE_FILE).is_file() or (log_dir / CHECKPOINTS).is_dir():
        return None
    try:
        tree = parse_yaml(read_plain_text(log_dir / RECIPE_FILE))
        place = tree["checkpointing"]["checkpoint_dir"]
    except (OSError, ValueError, KeyError, TypeError, YamlProblem):
        return None
    return str(place) if is_url(place) else None


def _at_url(url: str, step: int | None) -> Checkpoint:
    place, _, last = url.rstrip("/").rpartition("/")
    if STEP.fullmatch(last) and step is None:
        step = int(last.removeprefix("step_"))
    else:
        place = url.rstrip("/")
    checkpoints = RemoteCheckpoints(ObjectStore(place), staging=Path(CHECKPOINTS))
    if step is None:
        steps = checkpoints.steps()
        if not steps:
            raise CheckpointError(f"{url}: holds no checkpoint; expected records step_N.json, or the URL of one step_N")
        step = steps[-1]
    return checkpoints.fetched(checkpoints.one(step), prefix=f"{WEIGHTS}/")


def _chosen(place: Path, step: int | None) -> Path:
    if STEP.fullmatch(place.name) and step is None:
        return place
    below = place / CHECKPOINTS
    folder = below if below.is_dir() else place
    steps = [path for path in checkpoint_paths(folder) if STEP.fullmatch(path.name)]
    by_step = dict(sorted((int(path.name.removeprefix("step_")), path) for path in steps))
    if not by_step:
        raise CheckpointError(
            f"{place}: holds no checkpoint; expected a folder step_N, a folder of such, or the log folder of a run"
        )
    if step is None:
        return list(by_step.values())[-1]
    if step not in by_step:
        raise CheckpointError(f"{folder}: holds no step {step}, only {', '.join(str(number) for number in by_step)}")
    return by_step[step]
