"""`AdapterVersions`: which versions of an adapter an engine holds, which one rows get that begin, and which may go.

Used by the embedded engine's `AdapterSlots` and by `VllmAdapters`. Invariant: a version goes only to make room for
another one, and never while it is in use or rows that are being sampled have it. Imports neither torch nor an engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nemo_rl.errors import WorkerError, name_some
from nemo_rl.models.generation.interfaces import BASE

__all__ = ["AdapterVersions"]


class AdapterVersions:
    """Versions of one adapter.

    Args:
        most: versions that are held at once.

    Example:
        >>> versions = AdapterVersions(most=2)
        >>> for version in (0, 1):
        ...     versions.begin(version), versions.hold(version), versions.use(version)
        ((), None, None)
        ((), None, None)
        >>> versions.begin(2)
        (0,)
    """

    def __init__(self, *, most: int) -> None:
        self._most, self._held = most, list[int]()
        self.current: int | None = None
        """Version of rows that name none; None before the first."""

    @property
    def held(self) -> tuple[int, ...]:
        """Return versions that are held, oldest first."""
        return tuple(self._held)

    def has_room(self, version: int, live: Collection[int]) -> bool:
        """Return whether a version can be held beside those that rows have."""
        return len({old for old in self._held if old == self.current or old in live} - {version}) < self._most

    def begin(self, version: int, *, live: Collection[int] = ()) -> tuple[int, ...]:
        """Make room for a version, and return those that go; none where one of this number is held, which it replaces.

        Args:
            live: versions of rows that are being sampled.

        Raises:
            WorkerError: there is no room.
        """
        if version in self._held:
            # Sent again: a refit has failed, or other engines were lost in it.
            return ()
        gone = list[int]()
        for old in sorted(self._held):
            if len(self._held) - len(gone) < self._most:
                break
            if old != self.current and old not in live:
                gone.append(old)
        if len(self._held) - len(gone) >= self._most:
            raise WorkerError(
                f"expected a free slot for version {version} of the adapter, got {self._most} versions in use: "
                f"{name_some(self._held)}",
                stage="refit",
            )
        self._held = [old for old in self._held if old not in gone]
        return tuple(gone)

    def hold(self, version: int) -> None:
        """Remember a version that has come."""
        if version not in self._held:
            self._held.append(version)

    def use(self, version: int) -> None:
        """Let rows that name no version have this one."""
        self.check(version)
        self.current = version

    def resolved(self, version: int | None) -> int:
        """Return the version of a row, or `BASE`.

        Raises:
            WorkerError: it names none, and none was received yet; or it was retired.
        """
        if version is None:
            if self.current is None:
                raise WorkerError(
                    "expected an adapter, none was received yet; bring one by a refit", stage="generation"
                )
            return self.current
        if version != BASE:
            self.check(version)
        return version

    def check(self, version: int) -> None:
        """Raises:
        WorkerError: the version is not held.
        """
        if version not in self._held:
            raise WorkerError(
                f"expected version {version} of the adapter among those that are held, got "
                f"{name_some(self._held) or 'none'}; it was retired, or never received",
                stage="generation",
            )

    def check_request(self, versions: Sequence[int]) -> None:
        """Raises:
        WorkerError: a row would have a version that is not held.
        """
        named: Sequence[int | None] = versions or (None,)
        for version in set(named):
            self.resolved(version)
