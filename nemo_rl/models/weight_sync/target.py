"""What a refit calls on an engine: `RefitTarget`, and the part of it that engines of torch modules share.

Calls of one refit, in order: `report_device_id` and `refit_free_bytes` (once, to choose a transport), `match_refit`,
`delta_base` (only with `policy.generation.refit_delta`), `begin_refit`, then `load_bucket` for each bucket or
`receive_weights` for all of them, `finish_refit`, `answer_receipt`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch

from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.weight_sync.buckets import RefitPlan, WeightSlot, free_bytes
from nemo_rl.models.weight_sync.ipc_handle import IpcHandle, device_id
from nemo_rl.models.weight_sync.receipt.fingerprint import fingerprints
from nemo_rl.models.weight_sync.receipt.probe import Probe
from nemo_rl.models.weight_sync.receipt.records import Answer
from nemo_rl.models.weight_sync.receiver import RefitReceiver
from nemo_rl.models.weight_sync.refit_group import RefitGroupSpec

__all__ = ["ModuleRefitTarget", "RefitTarget"]


class RefitTarget(ABC):
    """An engine that `WeightSync` brings new weights to, bucket by bucket."""

    @abstractmethod
    def report_device_id(self) -> str:
        """The GPU's UUID, or host and `cpu`."""

    @abstractmethod
    def refit_free_bytes(self, *, on_device: bool) -> int:
        """Memory that a buffer may take a part of: of the engine's device, or of this machine."""

    @abstractmethod
    def match_refit(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        """The policy's weights, by Hugging Face name, in this engine's dtypes.

        Raises:
            ValueError: a name is unknown or missing, or has another shape; the old weights stay in use.
        """

    def delta_base(self) -> int | None:
        """Version of the weights that a delta can build on; -1: none. None: `load_bucket` knows no deltas."""
        return None

    @abstractmethod
    def begin_refit(self, plan: RefitPlan, *, handle: IpcHandle | None = None) -> None:
        """From here to `finish_refit` this engine holds no version."""

    @abstractmethod
    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        """The next bucket, given as uint8, or read from the shared memory."""

    @abstractmethod
    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        """(collective over the refit group)"""

    @abstractmethod
    def receive_weights(self) -> None:
        """(collective over the refit group) All buckets, while the policy sends them."""

    @abstractmethod
    def finish_refit(self, *, version: int) -> int:
        """All weights have come; returns the version now in use."""

    @abstractmethod
    def fingerprints(self) -> Mapping[str, str]:
        """Name -> fingerprint (`receipt.fingerprint`) of each weight as it lies here, or was handed on last."""

    @property
    def tied_names(self) -> Mapping[str, str]:
        """Name of a weight that is not sent -> the sent one that it is tied to, as `match_refit` found them."""
        return {}

    def answer_receipt(self, probe: Probe | None) -> Answer:
        """(ready to generate when it returns) What this engine holds, and how it scores the probe on its decode path.

        Args:
            probe: None: fingerprints alone.
        """
        assert isinstance(self, GenerationInterface), "an engine generates"
        self.prepare_for_generation()
        held, tied = self.fingerprints(), self.tied_names
        if probe is None:
            return Answer(fingerprints=held, aliases=tied, version=self.weight_version)
        output = self.generate(probe.request())
        return Answer(
            fingerprints=held,
            aliases=tied,
            version=max(output.row_versions),
            token_ids=tuple(output.token_ids.tolist()),
            logprobs=tuple(output.logprobs.tolist()),
            cached_tokens=() if output.cached_tokens is None else tuple(output.cached_tokens.tolist()),
        )


class ModuleRefitTarget(RefitTarget):
    """For an engine whose weights are one torch module in this process, under Hugging Face names."""

    _receiver: RefitReceiver | None = None

    @property
    @abstractmethod
    def refit_module(self) -> torch.nn.Module:
        """Whose weights are replaced."""

    @abstractmethod
    def hold_version(self, version: int) -> None:
        """Remembers the version of the weights; -1 while they are being replaced."""

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.refit_module.parameters()).device

    def report_device_id(self) -> str:
        return device_id(self.device)

    def refit_free_bytes(self, *, on_device: bool) -> int:
        return free_bytes(self.device if on_device else torch.device("cpu"))

    def match_refit(self, offered: Mapping[str, tuple[int, ...]]) -> tuple[WeightSlot, ...]:
        return self._refit().match(offered)

    def delta_base(self) -> int | None:
        return self._refit().delta_base

    def begin_refit(self, plan: RefitPlan, *, handle: IpcHandle | None = None) -> None:
        self.hold_version(-1)
        self._refit().begin(plan, handle)

    def load_bucket(self, bucket: np.ndarray | None = None) -> None:
        self._refit().load(bucket)

    def join_refit_group(self, spec: RefitGroupSpec) -> None:
        self._refit().join(spec)

    def receive_weights(self) -> None:
        self._refit().receive()

    def finish_refit(self, *, version: int) -> int:
        self._refit().finish()
        self.hold_version(version)
        return version

    def fingerprints(self) -> Mapping[str, str]:
        return fingerprints(self.refit_module.state_dict(keep_vars=True).items())

    @property
    def tied_names(self) -> Mapping[str, str]:
        return self._refit().tied_names

    def leave_refit(self) -> None:
        """For `shutdown`. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _refit(self) -> RefitReceiver:
        if self._receiver is None:
            self._receiver = RefitReceiver(self.refit_module, self.device)
        return self._receiver
