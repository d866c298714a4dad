"""`SessionTree`: the histories of one session as a tree of turns, and the rows of tokens in which they lie.

    root: prompt - turn 0 - reply - turn 1 - reply - turn 3      row 0: all of it
                              `---- other reply - turn 2         row 1: prompt, turn 0, other reply as context; turn 2
    root: prompt of a sub-agent, or a rewritten history - turn 4 row 2

    SessionTree.find     the deepest turn whose history the messages continue, compared message by message
    SessionTree.add
      |- _extend         its tokens stay; behind the last turn of a row the row grows, elsewhere another row begins
      `- _begin          a new root, whose messages are rendered

Called for programs, by `ProgramAttempt`; it knows nothing of protocols. Invariants: tokens that the engine gave are
never made again from text while a history continues its turn; every turn is sampled in one row, in whose mask alone it
is, so that each sampled token is trained once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.config.env import Ending
from nemo_rl.data.conversation import Message
from nemo_rl.data.thinking import final_answer
from nemo_rl.data.turn_encoder import TurnEncoder
from nemo_rl.environments.wire import sound_text
from nemo_rl.experience.conversation_attempt import SaidTurn
from nemo_rl.experience.token_row import TokenRow

__all__ = ["NoRoom", "SessionTree", "TurnNode"]

Tools = Sequence[Mapping[str, Any]]


class NoRoom(Exception):
    """A limit leaves no room for another turn.

    Args:
        ending: CONTEXT_FULL where a row is full; TURN_LIMIT where the session has all its rows.
    """

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.value)
        self.ending = ending


@dataclass(kw_only=True, slots=True, eq=False)
class TurnNode:
    """One turn of the model, sampled or about to be."""

    number: int
    """Number of the turn in the session, in the order of its requests."""
    parent: TurnNode | None
    given: tuple[Message, ...]
    """Messages between the parent's turn and this one; of a root the whole prompt."""
    encoder: TurnEncoder
    """The encoder of the tools that its row was begun with."""
    row: TokenRow
    begins_row: bool
    said: SaidTurn | None = None
    """None until it is sampled."""
    turn: Message | None = None
    """The turn as a program gives it back."""
    end: int = 0
    """Tokens of the row up to and with the turn."""
    depth: int = 0
    """Messages up to and with the turn."""
    digest: str = ""
    """Digest of the request that the turn answers."""
    children: list[TurnNode] = field(default_factory=list)

    def end_turn(self, said: SaidTurn) -> None:
        """Take the turn that was sampled; its tokens are in the row."""
        text = sound_text(said.parsed.text)
        self.said, self.end = said, len(self.row)
        self.turn = Message(role="assistant", content=text, calls=said.parsed.calls)

    def history(self) -> list[Message]:
        """Return all messages up to and with the turn."""
        parts, node = list[tuple[Message, ...]](), self
        while True:
            assert node.said is not None, "a history ends with a turn that was sampled"
            parsed = node.said.parsed
            parts.append((*node.given, Message(role="assistant", content=parsed.text, calls=parsed.calls)))
            if node.parent is None:
                return [message for part in reversed(parts) for message in part]
            node = node.parent


class SessionTree:
    """The histories of one session.

    Args:
        encoder: makes tokens of messages; `with_tools` gives that of a root.
        max_length: tokens of a row, with at least one of another turn.
        max_rows: rows of the session.
        is_open: True keeps all rows open, which is `data.history: branch`; False the last one alone: `append` and
            `new_row`.
        trains_sides: side requests are trained as well.
    """

    def __init__(
        self, encoder: TurnEncoder, *, max_length: int, max_rows: int, is_open: bool, trains_sides: bool
    ) -> None:
        self._encoder, self._max_length, self._max_rows = encoder, max_length, max_rows
        self._is_open, self._trains_sides = is_open, trains_sides
        self._roots: list[TurnNode] = []
        self._nodes: list[TurnNode] = []
        self._rows: list[TokenRow] = []

    @property
    def is_empty(self) -> bool:
        return not self._nodes

    def ended(self) -> tuple[list[TokenRow], list[TurnNode], list[TurnNode]]:
        """Return the rows to train, that with the last turn at the end; their turns, and those of side requests, by
        their numbers."""
        sides = [] if self._trains_sides else self._sides()
        said = [node for node in self._nodes if node.said is not None]
        rows = [row for row in self._rows if row.turns and not any(row is node.row for node in sides)]
        for row in rows:
            row.drop_open_reply()
        turns = [node for node in said if node not in sides]
        return sorted(rows, key=lambda row: row.turns[-1].number), turns, sides

    def _sides(self) -> list[TurnNode]:
        """Return the turns of side requests, such as for a title: one without tools, under another system prompt than
        every history with tools, that nothing continues, in a session that has tools."""
        roots = [root for root in self._roots if root.said is not None]
        with_tools = [root for root in roots if root.encoder.tools]
        systems = [_system(root) for root in with_tools]
        return [
            root
            for root in roots
            if with_tools
            and not root.encoder.tools
            and not root.children
            and all(message.role in ("system", "user") for message in root.given)
            and _system(root) not in systems
        ]

    # ---- growing

    def add(self, parent: TurnNode | None, messages: Sequence[Message], tools: Tools, *, number: int) -> TurnNode:
        """Return the turn to sample behind the messages, the tokens before which are in its row.

        Args:
            parent: of `find`.

        Raises:
            NoRoom: a limit is reached; the tree is as it was.
            DatasetError, ModelFolderError: the messages have no tokens.
        """
        if parent is None:
            return self._begin(messages, tools, number=number)
        return self._extend(parent, messages, number=number)

    def find(self, messages: Sequence[Message], tools: Tools) -> TurnNode | None:
        """Return the deepest turn whose history the messages repeat and continue with those of users or tools; of equal
        ones the newest."""
        found: TurnNode | None = None
        level = [root for root in self._roots if list(root.encoder.tools) == list(tools)]
        while level:
            node = level.pop()
            if not self._is_repeated(node, messages):
                continue
            is_better = found is None or (node.depth, node.number) > (found.depth, found.number)
            if is_better and all(message.role in ("user", "tool") for message in messages[node.depth :]):
                found = node
            level += node.children
        if found is not None and found.children and not self._is_open:
            return None
        return found

    def _is_repeated(self, node: TurnNode, messages: Sequence[Message]) -> bool:
        """Return whether the messages have those of the node and its turn in their places, and more behind them."""
        if node.turn is None or len(messages) <= node.depth:
            return False
        first = node.depth - len(node.given) - 1
        given, turn = messages[first : node.depth - 1], messages[node.depth - 1]
        return _is_same(node.turn, turn, drops=self._is_open) and all(map(_is_same, node.given, given))

    def _extend(self, parent: TurnNode, messages: Sequence[Message], *, number: int) -> TurnNode:
        said, new = parent.said, tuple(messages[parent.depth :])
        assert said is not None, "a turn that is continued was sampled"
        sampled, is_cut = said.sample.token_ids, said.sample.truncated
        found = parent.encoder.extend(parent.history(), new, sampled=sampled, is_cut=is_cut)
        row, before = parent.row, () if found.starts_row else parent.row.ids[: parent.end]
        begins_row = found.starts_row or bool(parent.children)
        self._check_room(len(before) + len(found.ids), begins_row=begins_row)
        if begins_row:
            row = self._new_row((*before, *found.ids))
        else:
            row.insert(found.ids, num_seam=found.num_seam)
        node = TurnNode(
            number=number,
            parent=parent,
            given=new,
            encoder=parent.encoder,
            row=row,
            begins_row=begins_row,
            depth=len(messages) + 1,
        )
        parent.children.append(node)
        self._nodes.append(node)
        return node

    def _begin(self, messages: Sequence[Message], tools: Tools, *, number: int) -> TurnNode:
        encoder = self._encoder.with_tools(tools)
        ids = encoder.prompt(messages)
        self._check_room(len(ids), begins_row=True)
        node = TurnNode(
            number=number,
            parent=None,
            given=tuple(messages),
            encoder=encoder,
            row=self._new_row(ids),
            begins_row=True,
            depth=len(messages) + 1,
        )
        self._roots = [*self._roots, node] if self._is_open else [node]
        self._nodes.append(node)
        return node

    def _check_room(self, num_tokens: int, *, begins_row: bool) -> None:
        if num_tokens >= self._max_length:
            raise NoRoom(Ending.CONTEXT_FULL)
        if begins_row and len(self._rows) >= self._max_rows:
            raise NoRoom(Ending.TURN_LIMIT)

    def _new_row(self, ids: Sequence[int]) -> TokenRow:
        self._rows.append(TokenRow(ids))
        return self._rows[-1]


def _system(root: TurnNode) -> tuple[str, ...]:
    return tuple(message.content.strip() for message in root.given if message.role == "system")


def _is_same(held: Message, given: Message, *, drops: bool = False) -> bool:
    """Return whether a program has given a message back as it was, but for white space around it.

    Args:
        drops: also without its thoughts, or, beside calls, without its text.
    """
    if held.role != given.role or held.calls != given.calls:
        return False
    text, got = held.content.strip(), given.content.strip()
    return got == text or (drops and (got == final_answer(text) or (not got and bool(held.calls))))
