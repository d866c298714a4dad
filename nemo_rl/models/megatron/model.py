"""`PolicyGPT`: megatron-core's decoder whose head runs at the positions that a pass asks for.

Logits are the largest tensor of a pass; of prompts and padding nobody reads them. Invariant: the embedding of the
padding token gets no gradient from where it is read, as in a Hugging Face model; of a tied one the head's part stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nemo_rl.models.megatron.attention import PackedSegments
from nemo_rl.models.megatron.mcore import GPTModel, gather_from_sequence_parallel_region

__all__ = ["PolicyGPT"]


class PolicyGPT(GPTModel):  # type: ignore[misc]
    """A pipeline stage; a pass hands it `PackedSegments`."""

    def __init__(self, *args: Any, padding_token: int | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._padding_token = padding_token
        if self.pre_process and padding_token is not None:
            self.embedding.register_forward_hook(self._leave_padding_out, with_kwargs=True)
        if self.post_process and self.output_layer.sequence_parallel:
            # The head gets positions that are gathered already, the same ones on every tensor rank.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = True

    def _leave_padding_out(
        self, _: torch.nn.Module, __: tuple[object, ...], kwargs: Mapping[str, Any], hidden: torch.Tensor
    ) -> torch.Tensor:
        """Where the padding token was read, the gradient of its embedding `[s, n, H]` ends.

        The layers get a view: whoever looks at its gradient sees it whole, as in a Hugging Face model.
        """
        if not hidden.requires_grad:
            return hidden
        is_padding = (kwargs["input_ids"] == self._padding_token).T[..., None]
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            is_padding = is_padding.chunk(group.size())[group.rank()]
        hidden.register_hook(lambda grad: grad.masked_fill(is_padding, 0.0))
        return hidden.view_as(hidden)

    def _postprocess(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedSegments, **_: object
    ) -> torch.Tensor:
        """The last stage's logits `[n, K, V]` of this tensor rank; before it the activations `[s, n, H]` as they are.

        Args:
            packed_seq_params: its `keep_K` are the positions; None means all.
        """
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # Every rank gets the whole gradient from the head, of which it keeps its own part.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        if packed_seq_params.keep_K is not None:
            hidden_states = hidden_states.index_select(0, packed_seq_params.keep_K)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _bias = self.output_layer(hidden_states, weight=weight)
        return logits.transpose(0, 1).contiguous()
