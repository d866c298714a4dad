"""`AdapterSlots`: the versions of an adapter that the embedded engine holds beside the frozen model, and the rows that
each serves.

Called by `TorchEngine`, which receives versions, and `DecodeBatch`, which says before each forward pass which rows have
which. Invariants: y = x W^T + (x A^T) (s B)^T in the trainer's order, so that with one version in a batch the bits are
the trainer's; a version is never changed after it was added; the model's weights are never written. Shapes: B rows of
a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from nemo_rl.config.backends import LoraConfig
from nemo_rl.models.adapters.lora import A_SUFFIX, B_SUFFIX, AddsResult, Product, adapted_layers, run_experts
from nemo_rl.models.generation.adapter_versions import HeldAdapters
from nemo_rl.models.generation.interfaces import BASE
from nemo_rl.models.weight_sync.receipt.fingerprint import fingerprints

__all__ = ["AdapterSlots"]

Tensors = Mapping[str, torch.Tensor]


class AdapterSlots(HeldAdapters):
    """Versions of one adapter of a model, in its memory."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, *, most: int) -> None:
        super().__init__(most=most)
        self._tensors = dict[int, Tensors]()
        self._num_rows = 0
        self._parts: Sequence[tuple[Tensors | None, torch.Tensor | None]] | None = None
        """Tensors of the rows at these places of a forward pass, or of all; None between passes."""
        self.device = model.device
        of_experts: dict[str, list[str]] = {}
        for layer in adapted_layers(model, config):
            owner, _, end = layer.name.rpartition(".")
            weight = model.get_parameter(layer.name if layer.num_experts else f"{layer.name}.weight")
            self._expect(layer, weight, rank=config.rank)
            if layer.num_experts:
                of_experts.setdefault(owner, []).append(end)
            else:
                module = model.get_submodule(layer.name)
                module.forward = partial(self._forward, module.forward, layer.name)  # type: ignore[method-assign]
        for owner, ends in of_experts.items():
            experts = model.get_submodule(owner)
            experts.forward = _Experts(self, experts, owner, ends)  # type: ignore[assignment]

    def _take(self, version: int, given: Tensors, gone: Sequence[int]) -> None:
        for old in gone:
            del self._tensors[old]
        self._tensors[version] = given

    def fingerprints(self, version: int) -> dict[str, str]:
        return fingerprints(self._of(version).items())

    @contextmanager
    def serving(self, versions_B: Sequence[int]) -> Iterator[None]:
        """Let rows of the forward passes inside the block have these versions."""
        distinct = sorted(set(versions_B))
        self._num_rows = len(versions_B)
        self._parts = [
            (
                None if version == BASE else self._of(version),
                None
                if len(distinct) == 1
                else torch.tensor([row for row, own in enumerate(versions_B) if own == version], device=self.device),
            )
            for version in distinct
        ]
        try:
            yield
        finally:
            self._parts = None

    @property
    def parts(self) -> Sequence[tuple[Tensors | None, torch.Tensor | None]]:
        """Return the tensors of a version, or None for none, and the rows that have it, or None for all."""
        assert self._parts is not None, "a forward pass happens inside `serving`"
        return self._parts

    def by_rows(self, value: torch.Tensor) -> torch.Tensor:
        """Return `[B, ..., n]`: some layers get the tokens of all rows laid end to end."""
        return value.reshape(self._num_rows, -1, value.shape[-1])

    def _of(self, version: int) -> Tensors:
        self.versions.check(version)
        return self._tensors[version]

    def _forward(self, forward: torch.nn.Module, name: str, value: torch.Tensor) -> torch.Tensor:
        parts = self.parts
        result: torch.Tensor = forward(value)
        for tensors, rows in parts:
            if tensors is None:
                continue
            a, b = tensors[f"{name}{A_SUFFIX}"], tensors[f"{name}{B_SUFFIX}"]
            if rows is None:
                result = result + linear(linear(value, a), b)
                continue
            of_rows, kept = self.by_rows(value), self.by_rows(result)
            kept[rows] = kept[rows] + linear(linear(of_rows[rows], a), b)
            result = kept.reshape(result.shape)
        return result


class _Experts:
    """The forward of fused experts, of which the tokens of each version run by themselves; `ends` are the ends of the
    names of weights that have adapters."""

    def __init__(self, slots: AdapterSlots, experts: torch.nn.Module, name: str, ends: Sequence[str]) -> None:
        self._slots, self._experts, self._name, self._ends = slots, experts, name, tuple(ends)
        self._plain = experts.forward

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        given, found = (hidden, index, weights), torch.zeros_like(hidden)
        for tensors, rows in self._slots.parts:
            if rows is None:
                return self._run(tensors, *given)
            of_rows = [self._slots.by_rows(each)[rows] for each in given]
            result = self._run(tensors, *(each.flatten(0, 1) for each in of_rows))
            self._slots.by_rows(found)[rows] = result.view_as(of_rows[0])
        return found

    def _run(
        self, tensors: Tensors | None, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        if tensors is None:
            return self._plain(hidden, index, weights)
        adapters = {
            end: _added(tensors[f"{self._name}.{end}{A_SUFFIX}"], tensors[f"{self._name}.{end}{B_SUFFIX}"])
            for end in self._ends
        }
        return run_experts(self._experts, adapters, hidden, index, weights)


def _added(a: torch.Tensor, b: torch.Tensor) -> AddsResult:
    def result(value: torch.Tensor, product: Product) -> torch.Tensor:
        return product(product(value, a, 1.0), b, 1.0)

    return result
