"""`Ranks`: what ranks send, assembled by run and group; complete phases are published one after the other."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl.tracer.frame import BadFrame, FramePart, FrameTable
from nemo_rl.tracer.protocol import RankGroup
from nemo_rl_tools.tracer.hub.assembly import Assembly, Phase
from nemo_rl_tools.tracer.hub.hub import Hub

__all__ = ["Peer", "Ranks"]

logger = logging.getLogger(__name__)

MAX_TEXTS_BYTES = 512 << 10
"""Most bytes of one table's texts, as JSON: half of what a header may have; the texts of further tokens are left
out."""
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in vocabularies of SentencePiece; decoding one token alone loses it."""


class HubTokenTexts:
    """Texts of single tokens, each decoded once."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._is_loaded = folder, folder is None
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}

    def load(self) -> None:
        """Read the vocabulary, which may take a second; a folder without one is told in the log, once."""
        if self._is_loaded:
            return
        self._is_loaded = True
        try:
            # Imported here: it is needed only where tokens are shown.
            from tokenizers import Tokenizer  # noqa: PLC0415

            self._tokenizer = Tokenizer.from_file(f"{self._folder}/tokenizer.json")
        except Exception as error:  # noqa: BLE001 - the library raises plain `Exception`; pictures are good without texts
            logger.warning("no token texts: %s/tokenizer.json: %s", self._folder, str(error)[:300])

    def of(self, ids_R: np.ndarray) -> dict[str, str]:
        """Return token id as a text -> text, of those that are known."""
        if self._tokenizer is None:
            return {}
        found, num_bytes = {}, 0
        for token in np.unique(ids_R).tolist():
            if token not in self._texts:
                self._texts[token] = _decode(self._tokenizer, token)
            text = self._texts[token]
            num_bytes += len(json.dumps(text)) + len(str(token)) + 6
            if num_bytes > MAX_TEXTS_BYTES:
                break
            found[str(token)] = text
        return found


def _decode(tokenizer: Any, token: int) -> str:
    piece = tokenizer.id_to_token(token) if token >= 0 else None
    if piece is None:
        return ""
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    return f" {text}" if piece.startswith(WORD_START) and not text.startswith(" ") else text


PACE_S = 2.0
"""Pictures of a phase may come so much later, so that a viewer that reads all the time misses none of them."""
MAX_TOLD = 1000
"""Problems that are told; who has seen so many needs no more."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank: ranks of several groups have the same numbers."""

    run: str
    group: RankGroup
    rank: int

    @property
    def text(self) -> str:
        """Return a text for people, such as `engine 0`."""
        return f"{self.group.member} {self.rank}"


class Ranks:
    """The ranks of a job."""

    def __init__(self, hub: Hub, *, tokenizer: Path | None = None) -> None:
        self._hub = hub
        self._texts = HubTokenTexts(tokenizer)
        self._has_tokenizer = tokenizer is not None
        self._assemblies: dict[tuple[str, RankGroup], Assembly] = {}
        self._told: set[tuple[Peer, str]] = set()
        self._wake = asyncio.Event()
        self._closed: deque[tuple[Assembly, Phase]] = deque()
        self._publishing = asyncio.Lock()

    def set_tokenizer(self, folder: Path) -> None:
        """Take the tokenizer that the driver names, unless the hub was configured with one."""
        if not self._has_tokenizer:
            self._texts, self._has_tokenizer = HubTokenTexts(folder), True

    def connect(self, peer: Peer, world: int) -> None:
        """Add a rank, one of `world` in its group."""
        self._of(peer.run, peer.group).connect(peer.rank, world)
        self._hub.set_run({"run": peer.run, **({"world": world} if peer.group is RankGroup.POLICY else {})})

    def disconnect(self, peer: Peer) -> None:
        self._of(peer.run, peer.group).disconnect(peer.rank)
        self._wake.set()

    def set_keys(self, run: str, group: RankGroup, step: int, keys: Sequence[str]) -> None:
        """Set the order of the rows of a step."""
        self._of(run, group).set_keys(step, keys)

    def begin(self, peer: Peer, step: int, phase: str) -> None:
        """Begin a phase of a rank."""
        self._of(peer.run, peer.group).begin(peer.rank, step, phase)

    def end(self, peer: Peer, step: int, phase: str, dropped: int) -> None:
        self._of(peer.run, peer.group).end(peer.rank, step, phase, dropped)
        self._wake.set()

    def add(self, peer: Peer, sent: FramePart | FrameTable) -> None:
        """Take a part or a table; one that fits nothing is told once per rank and kind of trouble."""
        assembly = self._of(peer.run, peer.group)
        num_late = assembly.num_late
        try:
            if isinstance(sent, FrameTable):
                assembly.add_table(peer.rank, sent)
            else:
                assembly.add_part(peer.rank, sent)
        except BadFrame as error:
            self.tell(peer, type(sent).__name__, f"a {sent.what} was left out: {error}")
        if assembly.num_late > num_late:
            self.tell(peer, "late", "skipped parts that came outside their phase or too late")

    def tell(self, peer: Peer, kind: str, text: str) -> None:
        if (peer, kind) not in self._told and len(self._told) < MAX_TOLD:
            self._told.add((peer, kind))
            self._hub.problem(f"{peer.text}: {text}")

    async def publish(self) -> None:
        """Publish complete phases, until it is cancelled."""
        while True:
            left = [each.seconds_left() for each in self._assemblies.values()]
            with suppress(TimeoutError):
                async with asyncio.timeout(min((seconds for seconds in left if seconds is not None), default=None)):
                    await self._wake.wait()
            self._wake.clear()
            for assembly in self._assemblies.values():
                self._closed += [(assembly, phase) for phase in assembly.take_closed()]
            await self._publish_closed()

    async def flush(self) -> None:
        """Publish all that waits, whole or not."""
        for assembly in self._assemblies.values():
            self._closed += [(assembly, phase) for phase in assembly.take_closed(all_of_them=True)]
        await self._publish_closed()

    async def _publish_closed(self) -> None:
        async with self._publishing:
            while self._closed:
                # The phase stays in the queue until it is done, so that a cancelled task does not lose the rest of it.
                await self._publish_phase(self._closed[0][1])
                assembly, phase = self._closed.popleft()
                assembly.release(phase)

    async def _publish_phase(self, phase: Phase) -> None:
        """Let others run between the pictures."""
        if phase.missing:
            logger.warning("step %d, %s: published without ranks %s", phase.step, phase.name, phase.missing)
        until_s = time.monotonic() + PACE_S
        for made in phase.frames(self._hub.limits.assembly_bytes):
            if isinstance(made, FrameTable):
                await asyncio.to_thread(self._texts.load)
                self._hub.publish_table(replace(made, texts=self._texts.of(made.tokens[2])))
            else:
                self._hub.publish_frame(made)
            await asyncio.sleep(0)
            # While nothing else is to be published, viewers that read get the time to.
            while self._hub.is_ahead and len(self._closed) == 1 and time.monotonic() < until_s:
                await asyncio.sleep(PACE_S / 1000)

    def _of(self, run: str, group: RankGroup) -> Assembly:
        if (run, group) not in self._assemblies:
            self._assemblies[run, group] = Assembly(run, limits=self._hub.limits)
        return self._assemblies[run, group]
