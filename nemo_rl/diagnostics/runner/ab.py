"""`run_ab`: the same rows in two layouts, on two workers or with two sets of weights, and where they first differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl.diagnostics.runner.layout_text import LayoutText
from nemo_rl.diagnostics.runner.run import RECORDS, ProbeResult, ProbeSpec, run_probe
from nemo_rl.errors import UserError

__all__ = ["ABRuns", "run_ab"]

SIDES = ("a", "b")
ROUTES = "routes.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ABRuns:
    """Two probes of the same rows."""

    a: ProbeResult
    b: ProbeResult
    records: tuple[Path, Path]
    noise: tuple[Path, ...] = ()
    """Records of further runs of side a."""


def run_ab(
    spec: ProbeSpec, a: LayoutText, b: LayoutText, *, pins_routes: bool = False, num_noise_runs: int = 0
) -> ABRuns:
    """Runs both sides, one after the other, each in a folder of its own under `spec.out`.

    Args:
        spec: with sites to record and a folder; its layout is replaced.
        pins_routes: side b, and repeated runs of side a, use the experts that side a chose.
        num_noise_runs: how often side a is run again, to measure what differs without a cause.

    Raises:
        UserError: as `run_probe`, or the folder holds an earlier comparison.
    """
    if spec.out is None or spec.dump is None:
        raise UserError("a comparison needs sites and a folder for its records: give --dump SELECTOR and --out DIR")
    routes = spec.out / ROUTES if pins_routes else None
    folders = [spec.out / side for side in SIDES]
    first = run_probe(replace(spec, layout=a, out=folders[0], routes_to=routes))
    second = run_probe(replace(spec, layout=b, out=folders[1], routes_from=routes))
    noise = [spec.out / f"a_again_{number}" for number in range(num_noise_runs)]
    for folder in noise:
        run_probe(replace(spec, layout=a, out=folder, routes_from=routes))
    return ABRuns(
        a=first,
        b=second,
        records=(folders[0] / RECORDS, folders[1] / RECORDS),
        noise=tuple(folder / RECORDS for folder in noise),
    )
