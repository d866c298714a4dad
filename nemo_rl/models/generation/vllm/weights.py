"""`VllmWeights`: new weights for a running vLLM, one by one, by the names of the Hugging Face model.

Used by `VllmEngine` and its refit. vLLM fuses and packs what it is given, so its own tensors cannot be compared with
anybody's: `fingerprints` are of what came, and of what vLLM's loaders were given. Invariant: after `begin` and before
`finish` returns, the engine holds no weights that may be sampled from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from nemo_rl.errors import name_some
from nemo_rl.models.hf_files import FileNames, as_stored
from nemo_rl.models.loading import DTYPES, load_model_config, model_without_weights
from nemo_rl.models.weight_sync.receipt.fingerprint import Fingerprints

__all__ = ["Hand", "VllmWeights", "expected_weights"]

Hand = Callable[[str, Sequence[tuple[str, torch.Tensor]]], Sequence[object]]
"""(method of `RefitExtension`, weights under the names of the model's files) -> what it returns in every worker."""


def expected_weights(folder: str | Path, *, precision: str) -> PreTrainedModel:
    """Return the model whose weights are expected: names, shapes and dtypes, without memory for them."""
    model = model_without_weights(load_model_config(folder), folder)
    return model.to(DTYPES[precision])  # type: ignore[arg-type]


class VllmWeights:
    """Hands new weights to one vLLM engine.

    Args:
        hand: to vLLM's workers.
    """

    def __init__(self, model: PreTrainedModel, hand: Hand) -> None:
        self._hand, self._file_names = hand, FileNames(model)
        names: dict[int, str] = {}
        state = model.state_dict(keep_vars=True)
        self._first = {name: names.setdefault(id(weight), name) for name, weight in state.items()}
        """Name of a weight -> its first name, which vLLM is told: a tied weight has several."""
        self._fingerprints, self._parts = Fingerprints(), Fingerprints()
        self._files: dict[str, tuple[str, ...]] = {}
        """Names in files of each weight that was handed over."""
        self._taken: set[str] = set()

    def begin(self) -> None:
        """Begin new weights."""
        self._taken = set()
        self._fingerprints, self._parts, self._files = Fingerprints(), Fingerprints(), {}
        self._hand("begin_weights", ())

    def take(self, name: str, weight: torch.Tensor) -> None:
        """Take one of them, in the engine's dtype; it must not change from here on."""
        self._fingerprints.add(name, weight)
        first = self._first[name]
        if first not in self._taken:
            self._taken.add(first)
            stored = list(as_stored(first, weight, self._file_names))
            self._files[first] = tuple(file_name for file_name, _ in stored)
            for file_name, part in stored:
                self._parts.add(file_name, part)
            self._hand("take_weights", stored)

    def finish(self) -> None:
        """Finish the weights: vLLM computes with them from here on.

        Raises:
            RuntimeError: some have not come.
        """
        missing = set(self._first.values()) - self._taken
        if missing:
            raise RuntimeError(f"{len(missing)} weights were not received, first {min(missing)!r}")
        self._hand("finish_weights", ())

    def fingerprints(self) -> Mapping[str, str]:
        """Name -> fingerprint of what came last; of what vLLM has loaded in its place, where that is something else."""
        handed, found = self._parts.result(), self._fingerprints.result()
        for loaded in self._hand("loaded_fingerprints", ()):
            assert isinstance(loaded, Mapping), "the workers answer by name"
            for name in found:
                files = self._files.get(self._first[name], ())
                wrong = [file for file in files if loaded.get(file) != handed[file]]
                if wrong:
                    is_whole = len(files) == 1
                    got = loaded.get(wrong[0], "nothing")
                    found[name] = got if is_whole else f"{got} in vLLM as {name_some(wrong)}"
        for layers in self._hand("stale_copies", ()):
            assert isinstance(layers, list), "the workers answer with names"
            for layer in layers:
                name = f"{layer}.weight"
                # A tied weight came under its first name.
                found[self._first.get(name, name)] = f"other values in the packed copy of vLLM's {layer}"
        return found
