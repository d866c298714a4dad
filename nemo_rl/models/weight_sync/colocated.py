"""Refit on one node: rank 0 of the policy exports full weights, every engine loads them, versions are compared.

The trainer calls `sync` after each optimizer update. Invariant: when `sync` returns, every engine samples from
exactly this version; an engine that reports another one stops the run.
"""

from __future__ import annotations

from nemo_rl.errors import WorkerError
from nemo_rl.models.generation.replicas import GenerationReplicas
from nemo_rl.models.policy.lm_policy import Policy

__all__ = ["ColocatedWeightSync"]


class ColocatedWeightSync:
    """Moves weights from a policy into generation replicas.

    Args:
        policy: source of the weights.
        generation: engines that load them.
    """

    def __init__(self, policy: Policy, generation: GenerationReplicas) -> None:
        self._policy = policy
        self._generation = generation
        self._version = -1

    @property
    def version(self) -> int:
        """Version in the engines; -1 before the first sync."""
        return self._version

    def is_stale(self, version: int) -> bool:
        """Whether the engines hold other weights than `version`."""
        return self._version != version

    def sync(self, version: int) -> None:
        """Exports, loads, and checks that every engine answers with `version`.

        Raises:
            WorkerError: an engine could not load the weights, or holds another version.
        """
        payload = self._policy.export_weights()
        self._generation.finish_generation()
        held = self._generation.load_payload(payload, version=version)
        wrong = {replica: got for replica, got in enumerate(held) if got != version}
        if wrong:
            raise WorkerError(f"expected weight version {version} in every engine, got {wrong}", stage="refit")
        self._version = version
        self._generation.prepare_for_generation()
