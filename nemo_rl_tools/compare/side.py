"""`Side`: a folder of records opened for a comparison: its sites, its tokens, and what was wrong with it.

A `ComparedSite` is a site over all ranks and microbatches, in the order in which passes meet it.
Invariant: nothing that a folder holds raises; it becomes a finding, and what is left is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from nemo_rl.errors import UserError, boundary, shorten
from nemo_rl.records.reader import CorruptRecord, RecordFolder, TensorRecord
from nemo_rl.records.record import RecordPlace, TokenTable, bytes_of, digest_of
from nemo_rl.records.sites import Direction, Selector, SiteKind, execution_order
from nemo_rl.tracer.watch import GENERATION
from nemo_rl_tools.verdict import Finding, Verdict

__all__ = ["PHASES", "POSITIONS", "ComparedSite", "Side", "token_texts"]

PHASES = ("prev_logprobs", "reference_logprobs", "forward", "train")
"""Passes in the order in which a step runs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedSite(RecordPlace):
    """A site over all microbatches.

    Example:
        >>> ComparedSite(phase="train", kind=SiteKind.MLP_OUT, layer=3, direction=Direction.BACKWARD).label
        'train/mlp.out[3] backward'
    """

    @classmethod
    def of_place(cls, place: RecordPlace) -> ComparedSite:
        """Raises:
        ValueError: the record names no such place.
        """
        numbers = (place.update, place.microbatch, 0 if place.layer is None else place.layer)
        if not all(isinstance(number, int) and number >= 0 for number in numbers) or not isinstance(place.phase, str):
            raise ValueError(f"unknown site: {place}")
        found = {part.name: getattr(place, part.name) for part in fields(place)}
        found |= {"microbatch": 0, "is_recomputed": bool(place.is_recomputed)}
        return cls(**found | {"name": None if place.name is None else str(place.name)})

    @property
    def short(self) -> str:
        """The name without its pass."""
        at = self.layer if self.name is None else self.name
        return f"{self.kind.value}{'' if at is None else f'[{at}]'}"

    @property
    def label(self) -> str:
        """The name shown in reports."""
        update = f"#{self.update}" if self.update else ""
        backward = " backward" if self.direction is Direction.BACKWARD else ""
        return f"{self.phase}{update}/{self.short}{backward}{' recomputed' if self.is_recomputed else ''}"

    @property
    def order(self) -> tuple[int, str, int, bool, tuple[int, int, int], str]:
        """Sorts sites as a step meets them; what is recomputed comes after all that is not."""
        phase = PHASES.index(self.phase) if self.phase in PHASES else len(PHASES)
        place = execution_order(self.kind, self.layer, self.direction)
        return (phase, self.phase, self.update, self.is_recomputed, place, self.name or "")

    @property
    def in_pass(self) -> tuple[str, int, bool, Direction]:
        """The identity of a pass, which sites share when one runs into the next."""
        return (self.phase, self.update, self.is_recomputed, self.direction)

    def is_taken_by(self, selector: Selector) -> bool:
        """Return whether a selector asks for the site."""
        if self.kind is SiteKind.GRAD and self.name is not None:
            return selector.takes_parameter(self.name)
        return selector.takes(self.kind, self.layer, self.direction)


POSITIONS = 1 << 40
"""More than a row has; a token's code is its sample's number times this plus its position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideTokens:
    """A table of tokens with its samples numbered over the whole side."""

    code_R: torch.Tensor
    token_R: torch.Tensor
    identity: str
    """Equal for tables of the same tokens in the same order."""


class Side:
    """One of the two folders.

    Args:
        name: in texts, "A" or "B".
    """

    def __init__(self, folder: RecordFolder, *, name: str) -> None:
        self.folder, self.name = folder, name
        self.is_engine = tuple(folder.manifest.phases) == (GENERATION,)
        """True for what a generation engine computed while it decoded."""
        self.renamed: dict[str, str] = {}
        """Name of a pass in the comparison -> its own."""
        self.findings = [
            Finding(
                verdict=Verdict.CORRUPT if problem.is_corrupt else Verdict.INCOMPLETE, text=f"{name}: {problem.text}"
            )
            for problem in folder.problems
        ]
        self.samples: dict[str, int] = {}
        """Key -> number."""
        self.has_all_ranks = not folder.problems
        self.sites: Mapping[ComparedSite, list[TensorRecord]] = self._sites()
        self._tokens: dict[tuple[int, str | None], SideTokens | None] = {}

    def rename_phase(self, phase: str, *, to: str) -> None:
        """Give the sites of one pass the name of another one, which the other side has."""
        self.renamed[to] = phase
        self.sites = {
            replace(site, phase=to) if site.phase == phase else site: found for site, found in self.sites.items()
        }

    def found(self, verdict: Verdict, text: str) -> None:
        finding = Finding(verdict=verdict, text=f"{self.name}: {text}")
        if finding not in self.findings:
            self.findings.append(finding)

    def load(self, record: TensorRecord) -> torch.Tensor | None:
        """Load a tensor; return None for bytes that are not those that were written."""
        try:
            return record.load()
        except CorruptRecord as error:
            self.found(Verdict.CORRUPT, str(error))
            return None

    def tokens(self, record: TensorRecord) -> SideTokens | None:
        """Return the tokens of the rows of a record that has them; None for a damaged table."""
        at = (record.rank, record.table)
        if at not in self._tokens:
            self._tokens[at] = self._read_tokens(record)
        return self._tokens[at]

    def read_samples(self) -> None:
        """Read all tables, so that `samples` is complete."""
        for records in self.sites.values():
            for record in records:
                if record.table is not None:
                    self.tokens(record)

    def sequences(self) -> Mapping[str, str]:
        """Return key -> digest of its tokens, over all tables and in the order of their positions."""
        tables = [table for table in self._tokens.values() if table is not None]
        if not tables:
            return {}
        code_N = torch.cat([table.code_R for table in tables])
        token_N = torch.cat([table.token_R for table in tables])
        pairs_2M = torch.stack((code_N, token_N)).unique(dim=1)
        numbers, counts = torch.unique_consecutive(pairs_2M[0] // POSITIONS, return_counts=True)
        parts = pairs_2M.split(counts.tolist(), dim=1)
        digests = {}
        for number, (code_L, token_L) in zip(numbers.tolist(), parts, strict=True):
            digests[number] = digest_of(bytes_of(torch.stack((code_L % POSITIONS, token_L))))
        return {key: digests[number] for key, number in self.samples.items() if number in digests}

    def key_of(self, code: int) -> str:
        return list(self.samples)[code // POSITIONS]

    def _sites(self) -> Mapping[ComparedSite, list[TensorRecord]]:
        sites: dict[ComparedSite, list[TensorRecord]] = {}
        for record in self.folder.records:
            try:
                sites.setdefault(ComparedSite.of_place(record.place), []).append(record)
            except ValueError as error:
                self.found(Verdict.CORRUPT, f"rank {record.rank}, record {record.seq}: {error}")
        return sites

    def _read_tokens(self, record: TensorRecord) -> SideTokens | None:
        try:
            table = record.tokens()
            return None if table is None else self._number(table)
        except (CorruptRecord, ValueError, RuntimeError) as error:
            self.found(Verdict.CORRUPT, f"rank {record.rank}, tokens {record.table!r}: {error}")
            return None

    def _number(self, table: TokenTable) -> SideTokens:
        columns = (table.row_R, table.position_R, table.token_R)
        if any(column.dtype != torch.int64 or column.dim() != 1 for column in columns):
            raise ValueError("expected three rows of int64")
        row_R, position_R, token_R = columns
        if len(table) and (int(row_R.min()) < 0 or int(row_R.max()) >= len(table.keys)):
            raise ValueError(f"a token names a row that the table of {len(table.keys)} rows lacks")
        if len(table) and (int(position_R.min()) < 0 or int(position_R.max()) >= POSITIONS):
            raise ValueError("a token has no position")
        number_K = torch.tensor([self.samples.setdefault(key, len(self.samples)) for key in table.keys] or [0])
        code_R = number_K[row_R] * POSITIONS + position_R
        return SideTokens(code_R=code_R, token_R=token_R, identity=digest_of(bytes_of(torch.stack((code_R, token_R)))))


TEXT_SHOWN = 40


def token_texts(tokenizer: str, tokens: Iterable[int]) -> tuple[Mapping[int, str], str | None]:
    """Token -> text, and why there is none; an empty folder name has neither."""
    wanted = sorted(set(tokens))
    if not tokenizer or not wanted:
        return {}, None
    if not Path(tokenizer).is_dir():
        return {}, f"no texts of tokens: {tokenizer} is no folder"
    from nemo_rl.data.tokenizer import load_tokenizer  # noqa: PLC0415 - transformers takes seconds to import

    try:
        loaded = load_tokenizer(tokenizer)
        with boundary(UserError, f"tokenizer {tokenizer!r}"):
            known = [token for token in wanted if 0 <= token < len(loaded)]
            return {token: shorten(str(loaded.decode([token])), limit=TEXT_SHOWN) for token in known}, None
    except UserError as error:
        return {}, f"no texts of tokens: {error}"
