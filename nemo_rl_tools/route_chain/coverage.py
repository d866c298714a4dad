"""Gaps of a trace: missing stages, samples, ranks, layers, tokens, forwards.

Called by `chain`. Limits that the files announce are no gaps, and neither are samples that
were retired on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from nemo_rl.errors import name_some
from nemo_rl_tools.route_chain.observe import Hop, Observation, RolloutSample
from nemo_rl_tools.route_chain.records import Trace, TraceRecord

__all__ = ["Gap", "TraceCoverage"]

What = Literal["stage", "sample", "rank", "layer", "tokens", "forward", "identity", "record"]
Pass: TypeAlias = tuple[str, int]
"""Stage, and its number in a process."""
Cell: TypeAlias = tuple[str, str, int, int | None, int]
"""Process, stage, step, microbatch, layer."""
TRAIN = "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """One thing that is missing."""

    what: What
    text: str


@dataclass(slots=True)
class TraceCoverage:
    """Collects what was seen, then reports what was not."""

    trace: Trace
    samples: Mapping[str, RolloutSample]
    fetched: dict[str, dict[str, set[int]]] = field(default_factory=dict)
    """Stage -> key -> layers."""
    num_fetched: dict[tuple[str, str], int] = field(default_factory=dict)
    """(stage, key) -> tokens."""
    assigned: dict[tuple[Pass, str, int], np.ndarray] = field(default_factory=dict)
    """(pass, key, layer) -> `[T]` bool: positions that a router was given a route for."""
    keys_assigned: dict[Pass, set[str]] = field(default_factory=dict)
    cells: dict[Hop, set[Cell]] = field(default_factory=lambda: {hop: set() for hop in Hop})
    identified: set[Cell] = field(default_factory=set)
    """Shards whose tokens were compared with the rollout's."""

    def add(self, seen: Observation) -> None:
        """An observation, whether it was right or wrong."""
        if seen.hop is Hop.FETCH:
            layers = self.fetched.setdefault(seen.stage, {}).setdefault(seen.keys[0], set())
            layers.update(seen.layers)
            self.num_fetched[seen.stage, seen.keys[0]] = len(seen.positions)
            return
        for layer in seen.layers:
            cell = (seen.record.process, seen.stage, seen.step, seen.microbatch, layer)
            self.cells[seen.hop].add(cell)
            if seen.hop is Hop.SHARD and seen.tokens is not None:
                self.identified.add(cell)
        if seen.hop is Hop.ASSIGNMENT:
            run = (seen.stage, seen.step)
            self.keys_assigned.setdefault(run, set()).update(seen.keys)
            for index, key in enumerate(seen.keys):
                if key not in self.samples:
                    continue
                length = len(self.samples[key].digests)
                positions = seen.positions[seen.key_index == index]
                held = self.assigned.setdefault((run, key, seen.layers[0]), np.zeros(length, dtype=bool))
                held[positions[(positions >= 0) & (positions < length)]] = True

    @property
    def retired(self) -> dict[str, str]:
        """Key -> why it is left out of training."""
        return {key: record.fields["reason"] for record in self.trace.of("retired") for key in record.fields["keys"]}

    @property
    def stages(self) -> list[str]:
        """Return the stages that replay routes: those that the driver named, or train and all that were seen."""
        planned = {stage for record in self.trace.of("trace_plan") for stage in record.fields["stages"]}
        seen = {*self.fetched, *(stage for stage, _ in self.keys_assigned)}
        return sorted(planned | seen | (set() if planned else {TRAIN}))

    def gaps(self, *, require_forward_verify: bool, require_cp_identity: bool) -> list[Gap]:
        """Return the gaps, in causal order."""
        found = [
            *self._fetch_gaps(),
            *self._rank_gaps(),
            *self._assignment_gaps(),
            *self._forward_gaps(),
        ]
        if require_cp_identity:
            found += self._identity_gaps()
        if require_forward_verify:
            found += self._verify_gaps()
        return found

    @property
    def microbatch_limit(self) -> int:
        limits = [_limit(record, "microbatches") for record in self.trace.of("trace_started")]
        return max(limits, default=1)

    def _fetch_gaps(self) -> Iterator[Gap]:
        retired = self.retired
        for stage in self.stages:
            by_key = self.fetched.get(stage, {})
            if not by_key and set(self.samples) - retired.keys():
                yield Gap(what="stage", text=f"stage {stage}: no sample was fetched")
                continue
            for key, sample in self.samples.items():
                if key not in by_key and key not in retired:
                    text = f"dropped sample: {key} was rolled out, never fetched for stage {stage}, and not retired"
                    yield Gap(what="sample", text=text)
                elif key in by_key and (left := set(sample.layers) - by_key[key]):
                    yield Gap(what="layer", text=f"stage {stage}: {key} was fetched without layers {name_some(left)}")
                elif key in by_key and self.num_fetched[stage, key] < len(sample.digests):
                    count = f"{self.num_fetched[stage, key]} of its {len(sample.digests)} tokens"
                    yield Gap(what="tokens", text=f"stage {stage}: {key} was fetched with {count}")
            unknown = [key for key in by_key if key not in self.samples]
            if unknown and not self._rollout_is_limited():
                text = f"stage {stage}: no rollout of {name_some(unknown)}, which was fetched"
                yield Gap(what="sample", text=text)

    def _rollout_is_limited(self) -> bool:
        """Return whether a process that recorded rollouts reached its limit: later ones are left out on purpose."""
        limits = {record.process: _limit(record, "steps") for record in self.trace.of("trace_started")}
        return any(
            record.fields.get("trace_step") == limits.get(record.process, 1) - 1
            for record in self.trace.of("rollout_payload_sample")
        )

    def _rank_gaps(self) -> Iterator[Gap]:
        started: dict[Pass, list[TraceRecord]] = {}
        for record in self.trace.of("stage_started"):
            started.setdefault(_pass(record), []).append(record)
        ended = {(record.process, _pass(record)): record for record in self.trace.of("stage_ended")}
        for run, records in started.items():
            sizes = [record.fields["world_size"] for record in records if record.rank is not None]
            if absent := set(range(max(sizes, default=0))) - {record.rank for record in records}:
                ranks = name_some(sorted(absent))
                yield Gap(what="rank", text=f"stage {run[0]}, step {run[1]}: no trace of rank {ranks}")
            for record in records:
                end = ended.get((record.process, run))
                who = f"stage {run[0]}, step {run[1]}: rank {record.rank} ({record.process})"
                if end is None or not end.fields.get("is_complete"):
                    yield Gap(what="rank", text=f"{who} did not come to its end")
                elif end.fields["microbatches"] and self.microbatch_limit and run[0] in self.stages:
                    yield from self._layer_gaps(record, who)

    def _layer_gaps(self, started: TraceRecord, who: str) -> Iterator[Gap]:
        """Return layers that a rank says it holds, of which no router was given routes."""
        stage, step = _pass(started)
        done = {cell[4] for cell in self.cells[Hop.ASSIGNMENT] if cell[:3] == (started.process, stage, step)}
        if left := set(started.fields.get("layers") or ()) - done:
            yield Gap(what="layer", text=f"{who} gave no routes to the routers of layer {name_some(sorted(left))}")

    def _assignment_gaps(self) -> Iterator[Gap]:
        retired = self.retired
        for stage in self.stages:
            runs = sorted(run for run in self.keys_assigned if run[0] == stage)
            if not runs and self.fetched.get(stage) and self.microbatch_limit:
                yield Gap(what="stage", text=f"stage {stage}: no router was given routes")
                continue
            for key in self.fetched.get(stage, {}) if runs and self._is_whole(stage) else ():
                if key in self.samples and key not in retired and not any(key in self.keys_assigned[r] for r in runs):
                    yield Gap(what="sample", text=f"dropped sample: {key} is in no microbatch of stage {stage}")
            for run in runs:
                yield from self._token_gaps(run)

    def _is_whole(self, stage: str) -> bool:
        """No rank had more microbatches in this stage than it traces."""
        counts = [
            record.fields.get("microbatches", 0)
            for record in self.trace.of("stage_ended")
            if record.fields.get("stage") == stage
        ]
        return max(counts, default=0) <= self.microbatch_limit

    def _token_gaps(self, run: Pass) -> Iterator[Gap]:
        for key in sorted(self.keys_assigned[run] & self.samples.keys()):
            unseen: list[int] = []
            holes: dict[tuple[int, int], list[int]] = {}
            for layer in self.samples[key].layers:
                held = self.assigned.get((run, key, layer))
                if held is None:
                    unseen.append(layer)
                # Nothing follows from the last token, so a worker may leave it out.
                elif not held[:-1].all():
                    lost = np.flatnonzero(~held[:-1])
                    holes.setdefault((len(lost), int(lost[0])), []).append(layer)
            where = f"stage {run[0]}, step {run[1]}: {key}"
            if unseen:
                yield Gap(what="layer", text=f"{where}: no router of layer {name_some(unseen)} was given its routes")
            for (count, first), layers in holes.items():
                lost_tokens = f"{count} of its tokens, the first at position {first}"
                yield Gap(what="tokens", text=f"{where}: no rank was given {lost_tokens}, in layer {name_some(layers)}")

    def _forward_gaps(self) -> Iterator[Gap]:
        forwards = {
            _cell(record)
            for record in self.trace.of("router_replay_action", "router_replay_forward_verify")
            if record.fields.get("action") == "replay_forward"
        }
        yield from _cell_gaps(self.cells[Hop.ASSIGNMENT] - forwards, "forward", "no forward used the routes given to")

    def _verify_gaps(self) -> Iterator[Gap]:
        recomputed = {
            _cell(record)
            for record in self.trace.of("router_replay_action")
            if record.fields["action"] == "replay_backward"
        }
        for used, hop, what in (
            (self.cells[Hop.ASSIGNMENT], Hop.FORWARD, "forward pass"),
            (recomputed, Hop.RECOMPUTE, "recomputation"),
        ):
            text = f"--require-forward-verify: no verified {what} of"
            yield from _cell_gaps(used - self.cells[hop], "forward", text)

    def _identity_gaps(self) -> Iterator[Gap]:
        text = "--require-cp-identity: no shard with tokens and slots for"
        blind = {(record.process, *_pass(record)) for record in self.trace.of("stage_started") if _is_inside(record)}
        cells = {cell for cell in self.cells[Hop.ASSIGNMENT] - self.identified if cell[:3] not in blind}
        yield from _cell_gaps(cells, "identity", text)


def _cell_gaps(cells: set[Cell], what: What, text: str) -> Iterator[Gap]:
    """Yield one line per stage; the first of its cells is named."""
    for stage in sorted({cell[1] for cell in cells}):
        mine = sorted((cell for cell in cells if cell[1] == stage), key=str)
        process, _, step, microbatch, layer = mine[0]
        where = f"process {process}, step {step}, microbatch {microbatch}, layer {layer}"
        more = f", and {len(mine) - 1} more" if len(mine) > 1 else ""
        yield Gap(what=what, text=f"stage {stage}: {text} {where}{more}")


def _is_inside(record: TraceRecord) -> bool:
    """Return whether the stage is inside a pipeline: it is given activations, and sees no tokens."""
    coords, sizes = record.fields.get("coords"), record.fields.get("sizes")
    if not isinstance(coords, dict) or not isinstance(sizes, dict):
        return False
    place, size = coords.get("pp"), sizes.get("pp")
    return isinstance(place, int) and isinstance(size, int) and 0 < place < size - 1


def _cell(record: TraceRecord) -> Cell:
    return (record.process, *_pass(record), record.fields["microbatch_idx"], record.fields["layer_number"])


def _pass(record: TraceRecord) -> Pass:
    return record.fields["stage"], record.fields["trace_step"]


def _limit(record: TraceRecord, name: str) -> int:
    limit = record.fields["limits"].get(name)
    return limit if isinstance(limit, int) else 1
