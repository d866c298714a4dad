"""`nemo-rl export`: the weights of a checkpoint as a Hugging Face folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nemo_rl.utils.console import make_console
from nemo_rl.utils.saved_weights import export_weights, find_checkpoint

__all__ = ["export"]


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="log folder of a run, or its folder of checkpoints")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder to make")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="default: the newest")] = None,
) -> None:
    """Copies weights, config and tokenizer of a checkpoint to DIR, which transformers and vLLM read.

    Every file is compared with the checkpoint's manifest before and after.

    Exit code: 0, or 2 where there is no such checkpoint, or DIR exists.
    """
    checkpoint = find_checkpoint(run, step=step)
    export_weights(checkpoint, out)
    make_console().print(f"step {checkpoint.step} of {run} is in {out}", soft_wrap=True)
