"""`VllmWeights`: new weights for a running vLLM, one by one, by the names of the Hugging Face model.

Used by `VllmEngine` and its refit. vLLM fuses and packs what it is given, so its own tensors cannot be compared with
anybody's: `fingerprints` are of what was handed over. Invariant: after `begin` and before `finish` returns, the engine
holds no weights that may be sampled from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from nemo_rl.models.hf_files import as_stored, expert_names
from nemo_rl.models.loading import DTYPES, load_model_config, model_without_weights
from nemo_rl.models.weight_sync.receipt.fingerprint import Fingerprints

__all__ = ["Hand", "VllmWeights", "expected_weights"]

Hand = Callable[[str, Sequence[tuple[str, torch.Tensor]]], None]
"""(method of `RefitExtension`, weights under the names of the model's files) -> calls it in every worker."""


def expected_weights(folder: str | Path, *, precision: str) -> PreTrainedModel:
    """The model whose weights are expected: names, shapes and dtypes, without memory for them."""
    model = model_without_weights(load_model_config(folder), folder)
    return model.to(DTYPES[precision])  # type: ignore[arg-type]


class VllmWeights:
    """The weights of one engine.

    Args:
        hand: to vLLM's workers.
    """

    def __init__(self, model: PreTrainedModel, hand: Hand) -> None:
        self._hand, self._file_names = hand, expert_names(model.config)
        names: dict[int, str] = {}
        state = model.state_dict(keep_vars=True)
        self._first = {name: names.setdefault(id(weight), name) for name, weight in state.items()}
        """Of the names that a tied weight has, the one that vLLM is told."""
        self._fingerprints = Fingerprints()
        self._taken: set[str] = set()

    def begin(self) -> None:
        """New weights follow."""
        self._taken = set()
        self._fingerprints = Fingerprints()
        self._hand("begin_weights", ())

    def take(self, name: str, weight: torch.Tensor) -> None:
        """One of them, in the engine's dtype; it must not change from here on."""
        self._fingerprints.add(name, weight)
        first = self._first[name]
        if first not in self._taken:
            self._taken.add(first)
            self._hand("take_weights", list(as_stored(first, weight, self._file_names)))

    def finish(self) -> None:
        """vLLM computes with them from here on.

        Raises:
            RuntimeError: some have not come.
        """
        missing = set(self._first.values()) - self._taken
        if missing:
            raise RuntimeError(f"{len(missing)} weights did not come, first {min(missing)!r}")
        self._hand("finish_weights", ())

    def fingerprints(self) -> Mapping[str, str]:
        """Name -> fingerprint of what was handed over last."""
        return self._fingerprints.result()
