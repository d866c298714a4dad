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
    feature_rt = micro.ids_nt.new_full((max(1, len(micro.rows)), width), -1)
    position_3rt = torch.arange(width, device=feature_rt.device).repeat(3, len(feature_rt), 1)
    first, has_positions = 0, False
    for place, (row, length) in enumerate(zip(row_tensors(extras), micro.lengths, strict=True)):
        ids_L = micro.ids_nt[place, :length]
        problem = family.row_problem(ids_L, row)
        if problem is not None:
            raise ValueError(f"images of {names[place]}: {problem}")
        places = family.places(ids_L, row)
        count = sum(family.features_of(row))
        feature_rt[place, :length] = torch.where(places.feature_L >= 0, places.feature_L + first, -1)
        first += count
        if places.position_3L is not None:
            position_3rt[:, place, :length], has_positions = places.position_3L, True
    is_none_ns = inputs.row_ns < 0
    at = inputs.row_ns.clamp(min=0), inputs.column_ns
    return replace(
        micro,
        inputs=replace(
            inputs,
            extras=extras,
            feature_ns=feature_rt[at].masked_fill(is_none_ns, -1),
            position_ids=position_3rt[:, at[0], at[1]] if has_positions else inputs.position_ids,
        ),
    )
