"""The verifier behind `nemo-rl inspect DIR routes`: routes of the rollout, and those that the routers used.

    rollout -> fetch -> shard -> assignment -> action -> forward -> recompute

Every record says which token of which sample lies in which slot, so each hop is compared with the rollout itself, not
with the hop before it. Hashes of whole tensors are not used. `RouteReport` is the comparison of a trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from nemo_rl.errors import UserError, name_some
from nemo_rl_tools.route_chain.compare import RouteComparison, compare, guess
from nemo_rl_tools.route_chain.coverage import Gap, TraceCoverage
from nemo_rl_tools.route_chain.observe import Hop, Observation, RolloutSample, named_layers, observe, read_sample
from nemo_rl_tools.route_chain.records import Trace, read_trace
from nemo_rl_tools.verdict import Comparison, Finding, SiteCheck, Verdict

__all__ = ["Mismatch", "RouteReport", "verify_trace"]

GAPS_SHOWN = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The first difference of a trace in causal order."""

    hop: str
    key: str
    stage: str
    step: int
    microbatch: int | None
    rank: int | None
    coords: Mapping[str, int]
    process: str
    layer: int | None
    """The layer, or None where the token itself differs."""
    position: int
    """Position of the token in its sample."""
    expected: list[int] | str
    """Ids as the rollout has them; their digest where a record holds no ids."""
    got: list[int] | str
    guess: str
    where: str
    """File and line."""

    def lines(self) -> list[str]:
        at = "".join(f" {axis}={place}" for axis, place in self.coords.items())
        batch = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        what = "token" if self.layer is None else f"layer {self.layer}"
        return [
            f"first bad hop: {self.hop}, stage {self.stage}, step {self.step}{batch}",
            f"  sample {self.key}, position {self.position}, {what}",
            f"  rank {'unknown' if self.rank is None else self.rank}{at}, process {self.process}, {self.where}",
            f"  expected {self.expected}",
            f"  got      {self.got}",
            f"  guess: {self.guess}",
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteReport(Comparison):
    """A comparison whose sites are hops: it also names the first token whose routes differ."""

    mismatch: Mismatch | None = None
    bad_records: Mapping[str, int] = field(default_factory=dict)
    """Hop -> records that differ from the rollout."""
    gaps: Sequence[Gap] = ()
    num_files: int = 0
    num_processes: int = 0
    num_samples: int = 0
    """Number of samples that the rollout recorded."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Event -> records."""
    compared: Mapping[str, int] = field(default_factory=dict)
    """`<hop>/<stage>` -> routes of one token and layer that were compared."""

    def more(self) -> Mapping[str, object]:
        own = ("bad_records", "num_files", "num_processes", "num_samples", "events", "compared")
        record: dict[str, object] = {name: getattr(self, name) for name in own}
        mismatch = None if self.mismatch is None else asdict(self.mismatch)
        return {**record, "mismatch": mismatch, "gaps": [asdict(gap) for gap in self.gaps]}

    def details(self) -> list[str]:
        """Return the first bad hop, and what is missing."""
        lines = [] if self.mismatch is None else self.mismatch.lines()
        lines += [f"missing: {gap.text}" for gap in self.gaps[:GAPS_SHOWN]]
        if len(self.gaps) > GAPS_SHOWN:
            lines.append(f"missing: {len(self.gaps) - GAPS_SHOWN} things more")
        read = f"read {self.num_files} files of {self.num_processes} processes, {self.num_samples} samples; records:"
        return [*lines, f"{read} {name_some([f'{count} {event}' for event, count in self.events.items()], limit=20)}"]


USED = (Hop.ASSIGNMENT, Hop.FORWARD, Hop.RECOMPUTE)
"""Hops at a router."""


def verify_trace(
    folder: Path, *, require_forward_verify: bool = False, require_cp_identity: bool = False
) -> RouteReport:
    """Read the files of all processes and close the chain.

    Args:
        require_forward_verify: each forward must have compared what it used with the digests of the rollout.
        require_cp_identity: each shard must name its slots and tokens.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a directory; pass NRL_R3_TRACE_DIR of a run with NRL_R3_TRACE=1")
    trace = read_trace(folder)
    check = _TraceCheck(trace)
    for seen in observe(trace, trace.damaged):
        check.add(seen)
    return check.report(require_forward_verify=require_forward_verify, require_cp_identity=require_cp_identity)


class _TraceCheck:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.samples: dict[str, RolloutSample] = {}
        self.first_bad: RouteComparison | None = None
        self.bad_records: Counter[Hop] = Counter()
        self.twice: Mismatch | None = None
        self.compared: Counter[tuple[Hop, str]] = Counter()
        self.num_unknown = 0
        self.wrong_verdicts: list[str] = []
        named = named_layers(trace)
        for record in trace.of("rollout_payload_sample"):
            try:
                sample = read_sample(record, named)
            except (TypeError, ValueError) as error:
                trace.damaged.append(str(error))
                continue
            if sample is None:
                trace.damaged.append(f"{record.where}: a rollout of {record.fields.get('key')!r} without routes")
                continue
            first = self.samples.setdefault(sample.key, sample)
            if first.layers != sample.layers or not np.array_equal(first.digests, sample.digests):
                self.twice = self.twice or _rolled_out_twice(first, sample)
        self.coverage = TraceCoverage(trace, self.samples)

    def add(self, seen: Observation) -> None:
        self.coverage.add(seen)
        self.num_unknown += sum(key not in self.samples for key in seen.keys)
        is_bad = False
        for found in compare(self.samples, seen):
            if found.kind == "routes":
                self.compared[seen.hop, seen.stage] += found.num_routes
            if found.is_bad.any():
                is_bad = True
                if self.first_bad is None or _order(found) < _order(self.first_bad):
                    self.first_bad = found
        self.bad_records[seen.hop] += is_bad
        if seen.record.fields.get("matches_expected") is False and not is_bad:
            text = "the forward used the routes of the rollout, but the digests that travelled with them differ"
            self.wrong_verdicts.append(f"{seen.record.where}: {text}")

    def report(self, *, require_forward_verify: bool, require_cp_identity: bool) -> RouteReport:
        """Return the report: a mismatch before anything missing, anything missing before nothing compared."""
        events = Counter(record.event for record in self.trace.records)
        gaps = [Gap(what="record", text=text) for text in self.trace.damaged]
        gaps += self.coverage.gaps(
            require_forward_verify=require_forward_verify, require_cp_identity=require_cp_identity
        )
        is_empty = not events.keys() - {"trace_started", "trace_plan"}
        finding = self._finding(gaps, is_empty=is_empty)
        first = self.twice if self.first_bad is None else self.twice or _mismatch(self.first_bad, self.samples)
        return RouteReport(
            title=f"routes of {len(self.samples)} samples, A of the rollout, B at each hop",
            sites=self._sites(),
            findings=() if finding is None else (finding,),
            notes=self._notes(),
            mismatch=first,
            bad_records={hop.name.lower(): n for hop, n in sorted(self.bad_records.items()) if n},
            gaps=() if is_empty else gaps,
            num_files=len(self.trace.files),
            num_processes=len({record.process for record in self.trace.records}),
            num_samples=len(self.samples),
            events=dict(sorted(events.items())),
            compared={f"{hop.name.lower()}/{stage}": n for (hop, stage), n in sorted(self.compared.items())},
        )

    def _sites(self) -> list[SiteCheck]:
        """Return the hops at which something was compared, in causal order."""
        counts: Counter[Hop] = Counter()
        for (hop, _), count in self.compared.items():
            counts[hop] += count
        return [
            SiteCheck(
                name=hop.name.lower(),
                a=f"{counts[hop]:,} routes",
                b=f"{counts[hop]:,} routes",
                agrees=not self.bad_records[hop],
                difference=f"{self.bad_records[hop]} bad records" if self.bad_records[hop] else "",
            )
            for hop in Hop
            if counts[hop] or self.bad_records[hop]
        ]

    def _finding(self, gaps: Sequence[Gap], *, is_empty: bool) -> Finding | None:
        """Return why routes that agree are not enough; None where they are, or where a hop differs."""
        if self.twice is not None:
            return Finding(verdict=Verdict.MISMATCH, text="two rollouts of one sample differ")
        if self.first_bad is not None:
            return None
        if self.wrong_verdicts:
            return Finding(verdict=Verdict.MISMATCH, text="a forward was found wrong when it ran")
        if is_empty:
            return Finding(verdict=Verdict.VACUOUS, text="the folder holds no trace of routes")
        if gaps and not self._is_all_retired():
            return Finding(verdict=Verdict.INCOMPLETE, text=f"{len(gaps)} things are missing")
        if not any(self.compared[key] for key in self.compared if key[0] in USED):
            return Finding(verdict=Verdict.VACUOUS, text="no route at a router was compared")
        if self._is_uniform():
            text = "all tokens have the same routes: nothing can be distinguished"
            return Finding(verdict=Verdict.VACUOUS, text=text)
        return None

    def _is_all_retired(self) -> bool:
        """No sample is left that could be missing anywhere."""
        return bool(self.samples) and not self.samples.keys() - self.coverage.retired.keys() and not self.trace.damaged

    def _is_uniform(self) -> bool:
        rows = [sample.digests[~sample.is_missing.any(axis=1)] for sample in self.samples.values()]
        if len({row.shape[1] for row in rows}) != 1:
            return False
        stacked = np.concatenate([row for row in rows if row.size] or [np.zeros((0, 1))])
        return len(stacked) > 1 and bool((stacked == stacked[0]).all())

    def _notes(self) -> list[str]:
        notes = [f"torn line, left by a process that was killed: {where}" for where in self.trace.torn]
        retired = self.coverage.retired
        if retired:
            notes.append(f"{len(retired)} samples were retired: {name_some(sorted(set(retired.values())))}")
        notes += self.wrong_verdicts
        if self.num_unknown:
            notes.append(f"{self.num_unknown} times a sample whose rollout was not traced; its routes are unchecked")
        return notes


def _order(found: RouteComparison) -> tuple[int, Hop, float]:
    """Causal: what a step has spoiled cannot be the fault of a later hop or step."""
    return found.seen.step, found.seen.hop, found.seen.record.time


def _mismatch(found: RouteComparison, samples: Mapping[str, RolloutSample]) -> Mismatch:
    seen, place = found.seen, found.first
    is_token = found.kind == "tokens"
    layer = None if is_token else seen.layers[place.column]
    sample = samples[place.key]
    expected: list[int] | str = _shown(found.expected[place.slot, place.column], is_token)
    got: list[int] | str = _shown(found.got[place.slot, place.column], is_token)
    source = -1 if layer is None else sample.columns([layer])[0]
    if place.position >= len(sample.digests) or (layer is not None and source < 0):
        expected = f"nothing: the rollout has {len(sample.digests)} tokens and layers {list(sample.layers)}"
    elif not is_token and sample.ids is not None:
        expected = sample.ids[place.position, source].tolist()
    if not is_token and seen.ids is not None:
        got = seen.ids[place.slot, place.column].tolist()
    return Mismatch(
        hop=seen.hop.name.lower(),
        key=place.key,
        stage=seen.stage,
        step=seen.step,
        microbatch=seen.microbatch,
        rank=seen.record.rank,
        coords=seen.coords,
        process=seen.record.process,
        layer=layer,
        position=place.position,
        expected=expected,
        got=got,
        guess=guess(found, samples),
        where=seen.record.where,
    )


def _shown(value: np.int64, is_token: bool) -> list[int] | str:
    return [int(value)] if is_token else f"digest {int(value) & (1 << 64) - 1:016x}"


def _rolled_out_twice(first: RolloutSample, second: RolloutSample) -> Mismatch:
    """Return one key with two sets of routes: nothing after it can be judged."""
    return Mismatch(
        hop=Hop.ROLLOUT.name.lower(),
        key=first.key,
        stage="rollout",
        step=second.record.get("trace_step", int),
        microbatch=None,
        rank=second.record.rank,
        coords={},
        process=second.record.process,
        layer=None,
        position=0,
        expected=f"routes as in {first.record.where}",
        got="other routes for the same sample",
        guess="two attempts wrote into one folder: give each its own NRL_R3_TRACE_DIR, or delete the folder before",
        where=second.record.where,
    )
