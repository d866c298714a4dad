"""`PlainHead`: takes hidden states and weights from a Hugging Face model's head, in place of logits.

Attached by `parallelize` before adapters and tensor parallelism wrap the head's forward, so that in a pass it sees the
hidden states as they are brought in, and this rank's part of the weights. Invariant: a model has one only if its logits
follow from the head's product by a factor and a cap, which is compared with the model's own code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from nemo_rl.errors import shorten
from nemo_rl.models.adapters.lora import Adapter
from nemo_rl.models.head.lazy_logits import LazyLogits
from nemo_rl.models.hf.loading import ADAPTER_PART

__all__ = ["PlainHead"]

logger = logging.getLogger(__name__)

PROBES = (-60.0, -7.0, -0.5, 0.0, 0.25, 3.0, 20.0, 80.0)
"""Products that are handed to the model's own code to see what it makes of them."""
SCALES = {"logit_scale": 1.0, "logits_scaling": -1.0}
"""Key of a config -> power to which its value scales the logits."""
CAP = "final_logit_softcapping"


class PlainHead:
    """The head of one model."""

    def __init__(self, head: torch.nn.Linear) -> None:
        self._head = head
        self._product = head.forward
        self._is_taking = False
        self._taken: LazyLogits | None = None
        self._placeholder = torch.tensor(PROBES)
        self.scale, self.cap = 1.0, None

    @classmethod
    def of(cls, hf: PreTrainedModel) -> PlainHead | None:
        """Return the head, attached; None, with a line in the log, where logits are not known to be a plain product."""
        head = hf.get_output_embeddings()
        try:
            if type(head) is not torch.nn.Linear:
                raise TypeError(f"the head is a {type(head).__name__}")
            found = cls(head)
            found._find_form(hf)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            # The model's own code ran with a placeholder for its layers.
            logger.info("%s keeps its logits whole: %s", type(hf).__name__, shorten(repr(error)))
            return None
        head.forward = found._forward  # type: ignore[assignment]
        return found

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Let the passes inside compute no logits; what they hand out in their place means nothing."""
        adapter = self._head._modules.get(ADAPTER_PART)
        self._is_taking = True
        if isinstance(adapter, Adapter):
            adapter.take = self._take_adapter
        try:
            yield
        finally:
            self._is_taking = False
            if isinstance(adapter, Adapter):
                adapter.take = None

    def taken(self) -> LazyLogits:
        """Return the logits of the last pass, with its leading dimensions, and forget them."""
        taken, self._taken = self._taken, None
        assert taken is not None, "the model has not called its head"
        return taken

    # Private parts.

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # Tensor parallelism lets the attributes be this rank's parts while the forward runs.
        weight, bias = self._head.weight, self._head.bias
        if not self._is_taking:
            return torch.nn.functional.linear(hidden, weight, bias)
        self._taken = LazyLogits(hidden_MD=hidden, weight_VD=weight, bias_V=bias, scale=self.scale, cap=self.cap)
        return self._shown(hidden, weight, bias)

    def _take_adapter(self, narrow: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        assert self._taken is not None
        self._taken = replace(self._taken, narrow_Mr=narrow, wide_Vr=wide)
        return self._shown(narrow, wide, None)

    def _shown(self, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return what leaves the head: where somebody looks at its logits these, else a placeholder."""
        if self._head._forward_hooks:
            with torch.no_grad():
                return torch.nn.functional.linear(left, right, bias)
        if self._placeholder.device != left.device:
            self._placeholder = self._placeholder.to(left.device)
        return self._placeholder.to(left.dtype).expand(*left.shape[:-1], len(PROBES))

    def _find_form(self, hf: PreTrainedModel) -> None:
        """Find factor and cap of the logits; raise ValueError where they are another function of the product."""
        base: Any = hf.base_model
        if base is hf:
            raise ValueError("the layers are no part of their own")
        config = hf.config.get_text_config().to_dict()
        probe = self._placeholder[None, None].double()
        with (
            torch.no_grad(),
            _replaced(base, lambda *_, **__: _Decoded(torch.zeros(1, 1, 1))),
            _replaced(self._head, lambda _: probe),
        ):
            found = hf(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
        scales = [1.0, *(float(config[key]) ** power for key, power in SCALES.items() if config.get(key))]
        for cap in {None, config.get(CAP)}:
            for scale in scales:
                expected = scale * probe if cap is None else cap * torch.tanh(scale * probe / cap)
                if found.shape == expected.shape and torch.allclose(found.double(), expected, rtol=1e-5):
                    self.scale, self.cap = scale, cap
                    return
        raise ValueError("its logits are no product of hidden states and head with a known factor and cap")


class _Decoded:
    """Output of a decoder that has not run."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.last_hidden_state


@contextmanager
def _replaced(module: Any, forward: Any) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
