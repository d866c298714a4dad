"""Attention and positions of a forward pass whose sequences are described by `Segments`.

Handed to megatron-core's layers as core attention and rotary embedding. A pass gives them a `PackedSegments` where
megatron-core passes its own record on, so that a recomputed layer sees the sequences of its own microbatch. Invariant:
the numbers are those of the DTensor worker's attention, which is the same function. Shapes: s local positions, n rows,
H query heads and G key heads of this tensor rank, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from nemo_rl.models.attention.varlen import Pattern, Segments, varlen_attention
from nemo_rl.models.megatron.architecture import rotary_frequencies
from nemo_rl.models.megatron.mcore import MegatronModule, PackedSeqParams, TransformerConfig

__all__ = ["PackedSegments", "Rotary", "SegmentAttention"]

SEGMENT_FORMAT = "segments"
"""Any value but megatron-core's `thd`: positions and attention are ours, in the layout `[s, n, H, D]`."""


@dataclass
class PackedSegments(PackedSeqParams):  # type: ignore[misc]
    """The sequences of a pass, which every layer needs besides the activations."""

    qkv_format: str = SEGMENT_FORMAT
    segments: Segments | None = None
    position_s: torch.Tensor | None = None
    """`[s]` int64, restarting with every sequence."""
    keep_K: torch.Tensor | None = None
    """`[K]` local positions whose logits are computed; None means all."""


class Rotary(torch.nn.Module):
    """Rotary angles at the positions of a pass, with the frequencies that Hugging Face computes for the model."""

    def __init__(self, config: PretrainedConfig) -> None:
        """Args:
        config: one that `Architecture.of` accepts.
        """
        super().__init__()
        self.inverse_frequencies, self.attention_scaling = rotary_frequencies(config)

    def get_rotary_seq_len(self, *args: Any, **_: object) -> torch.Tensor:
        """Return the positions: megatron-core asks for a length and hands it to `forward`; here it is the positions
        themselves."""
        packed = args[4]
        assert isinstance(packed, PackedSegments), "the pass has no PackedSegments"
        assert packed.position_s is not None
        return packed.position_s

    def forward(self, position_s: torch.Tensor, **_: object) -> torch.Tensor:
        """Return `[s, 1, 1, D]` float32."""
        self.inverse_frequencies = self.inverse_frequencies.to(position_s.device)
        angles = torch.outer(position_s.float(), self.inverse_frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class SegmentAttention(MegatronModule):  # type: ignore[misc]
    """Core attention of a layer."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: object, **kwargs: Any) -> None:
        """Args:
        layer_number: counts from 1 over all pipeline stages.
        """
        super().__init__(config=config)
        window: int | None = config.attention_windows[layer_number - 1]
        self.pattern = None if window is None else Pattern(window=window)
        self.dropout: float = config.attention_dropout
        self.scaling = float(config.softmax_scale or config.kv_channels**-0.5)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSegments | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return `[s, n, H * D]` (collective over the context group).

        Args:
            query: `[s, n, H, D]`; key and value `[s, n, G, D]`.
        """
        assert packed_seq_params is not None, "the pass has no PackedSegments"
        assert attention_mask is None, "segments take the place of a mask"
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        found, _weights = varlen_attention(
            self,
            q,
            k,
            v,
            self.pattern,
            scaling=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            segments=packed_seq_params.segments,
        )
        return found.transpose(0, 1).flatten(2)
