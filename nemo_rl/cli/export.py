"""`nemo-rl export`: the weights of a checkpoint as a Hugging Face folder of their own."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from nemo_rl.utils.console import make_console
from nemo_rl.utils.saved_weights import export_weights, find_checkpoint

__all__ = ["export"]


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
    """Copies weights, config and tokenizer of a checkpoint to DIR, which transformers and vLLM read.

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
