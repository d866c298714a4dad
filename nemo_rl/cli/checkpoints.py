"""`nemo-rl eval` and `nemo-rl export`: measure the weights of a checkpoint, or copy them into a folder of their own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.errors import CheckpointError
from nemo_rl.utils import interrupt
from nemo_rl.utils.console import make_console
from nemo_rl.utils.files import write_text
from nemo_rl.utils.memory import package_versions
from nemo_rl.utils.saved_weights import export_weights, find_checkpoint

if TYPE_CHECKING:
    from nemo_rl.experience.evaluation.result import ValidationResult

__all__ = ["evaluate", "export"]

RESULT_FILE, SAMPLES_FILE = "evaluation.json", "samples.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weights:
    """The weights that are evaluated."""

    model: str
    """Folder, or name on the hub."""
    step: int
    """0 for what is no checkpoint of a run."""
    state: Mapping[str, object] = field(default_factory=dict)
    """State that the checkpoint holds."""


def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="a checkpoint step_N, a run, a model folder or a model's name")
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
    weights = _find(checkpoint, step)
    config = _for_evaluation(load_config(recipe, list(overrides or ())), weights.model, out)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.cluster.threads_per_worker))
    began = time.monotonic()
    result = _evaluated(config, weights, limit, out, report=lambda line: None if as_json else console.print(line))
    record = _record(config, weights, result, seconds=time.monotonic() - began)
    write_text(out / RESULT_FILE, json.dumps(record, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(record, indent=1))
        return
    from nemo_rl.experience.evaluation.result import evaluation_lines  # noqa: PLC0415 - imports torch

    for line in evaluation_lines(result.sets, confidence=config.evaluation.confidence):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"result {out / RESULT_FILE}, samples {out / SAMPLES_FILE}")


def _find(given: str, step: int | None) -> _Weights:
    place = Path(given)
    if place.is_dir() and not (place / "config.json").is_file():
        found = find_checkpoint(place, step=step)
        return _Weights(model=str(found.weights), step=found.step, state=found.state)
    if step is not None:
        raise CheckpointError(f"--step {step}: {given} is no run and holds no checkpoints; leave it out")
    return _Weights(model=given, step=0)


def _for_evaluation(config: MasterConfig, model: str, out: Path) -> MasterConfig:
    policy = config.policy.model_copy(update={"model_name": model})
    logger = config.logger.model_copy(update={"log_dir": out})
    return config.model_copy(update={"policy": policy, "logger": logger})


def _evaluated(
    config: MasterConfig, weights: _Weights, limit: int | None, out: Path, *, report: Callable[[str], None]
) -> ValidationResult:
    """Import torch and Ray only here."""
    from nemo_rl.algorithms.worker_forks import worker_forks  # noqa: PLC0415

    with worker_forks(config) as forks:
        from nemo_rl.algorithms.evaluate import open_evaluator  # noqa: PLC0415
        from nemo_rl.algorithms.identity import run_start  # noqa: PLC0415
        from nemo_rl.experience.evaluation.evaluator import EvaluationTask, SampleFile  # noqa: PLC0415

        now = run_start(weights.state, where=weights.model)
        with open_evaluator(config, report=report, forks=forks, now=now) as evaluator:
            samples = SampleFile(path=out / SAMPLES_FILE, max_rows=None)
            result = evaluator.evaluate(
                EvaluationTask(step=weights.step, version=None, max_prompts=limit, samples=samples)
            )
    for line in result.printed:
        report(f"reward: {line}")
    return result


def _record(config: MasterConfig, weights: _Weights, result: ValidationResult, *, seconds: float) -> dict[str, object]:
    """Return all that is needed to quote the numbers, or to get them again."""
    return {
        "checkpoint": weights.model,
        "step": weights.step,
        "sets": {name: found.as_record() for name, found in result.sets.items()},
        "seed": config.grpo.seed,
        "evaluation": config.evaluation.model_dump(mode="json"),
        "generation": config.policy.generation.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json", exclude={"train"}),
        "env": config.env.model_dump(mode="json"),
        "packages": dict(package_versions()),
        "seconds": round(seconds, 3),
    }


class Dtype(StrEnum):
    """Dtypes of exported weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="log folder of a run, or its folder of checkpoints")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder to make")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="default: the newest")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="default: that of the model which the run started from")
    ] = None,
) -> None:
    """Copy weights, config and tokenizer of a checkpoint to DIR, which transformers and vLLM read.

    Every file is compared with the checkpoint's manifest before it is written in another dtype.

    Exit code: 0, or 2 where there is no such checkpoint, DIR exists, or a weight is too large for the dtype.
    """
    # torch takes seconds to import, and other commands need none.
    from nemo_rl.algorithms.identity import exported_dtype, model_dtype  # noqa: PLC0415
    from nemo_rl.models.hf_writing import cast_folder  # noqa: PLC0415
    from nemo_rl.models.loading import DTYPES  # noqa: PLC0415

    checkpoint = find_checkpoint(run, step=step)
    stored = model_dtype(checkpoint.weights)
    wanted = exported_dtype(checkpoint.state) if dtype is None else dtype.value
    is_cast = wanted in DTYPES and wanted != stored
    export_weights(checkpoint, out, change=partial(cast_folder, dtype=DTYPES[wanted]) if wanted and is_cast else None)
    how = f"{wanted if is_cast else stored}" + ("" if wanted in DTYPES else ", as it was saved")
    make_console().print(f"step {checkpoint.step} of {run} is in {out} ({how})", soft_wrap=True)
