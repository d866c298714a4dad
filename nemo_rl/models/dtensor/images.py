"""Images of the rows of a microbatch: checked, and given a place in the forward pass.

Called by the train step. Invariant: what a row computes depends on its own images alone, however rows are laid out.
Shapes: n rows of the pass, s positions of this rank, t longest row of the microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.microbatch import Microbatch
from nemo_rl.models.vision import VisionFamily, row_tensors

__all__ = ["place_images"]


def place_images(
    micro: Microbatch, batch: BatchedDataDict, family: VisionFamily, *, names: Sequence[str]
) -> Microbatch:
    """Return the microbatch with the places of its images and the positions of its tokens.

    A batch without columns of images is left as it is: all its ranks run the language model alone.

    Args:
        names: of the rows, for errors.

    Raises:
        ValueError: tokens and images of a row do not fit.
    """
    missing = [column.name for column in family.columns if column.name not in batch]
    if missing and len(missing) < len(family.columns):
        raise ValueError(
            f"columns of images: {family.config.model_type!r} needs {[column.name for column in family.columns]}, "
            f"and the rows lack {missing}"
        )
    if missing:
        return micro
    extras = {column.name: micro.inputs.extras.get(column.name, ()) for column in family.columns}
    inputs = micro.inputs
    width = micro.ids_nt.shape[1]
    rows, spans = list(row_tensors(extras)), [slice(length) for length in micro.lengths]
    ids = [row_ids[span] for row_ids, span in zip(micro.ids_nt, spans, strict=True)]
    for name, row, ids_L in zip(names, rows, ids, strict=True):
        problem = family.row_problem(ids_L, row)
        if problem is not None:
            raise ValueError(f"images of {name}: {problem}")
    counted_rt = torch.arange(width, device=micro.ids_nt.device).repeat(max(1, len(rows)), 1)
    feature_rt, position_3rt = family.places_of_rows(rows, ids, spans, counted_rt)
    is_none_ns = inputs.row_ns < 0
    at = inputs.row_ns.clamp(min=0), inputs.column_ns
    return replace(
        micro,
        inputs=replace(
            inputs,
            extras=extras,
            feature_ns=feature_rt[at].masked_fill(is_none_ns, -1),
            position_ids=inputs.position_ids if position_3rt is None else position_3rt[:, at[0], at[1]],
        ),
    )
