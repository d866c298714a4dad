"""`nemo-rl doctor`: whether this machine is in order for a run, and what to do where it is not."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from nemo_rl.utils.console import make_console

__all__ = ["doctor"]

FORMAT = 1


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="findings as JSON on standard output")] = False,
    self_test: Annotated[bool, typer.Option(help="also run two ranks with a data plane")] = True,
) -> None:
    """Look at versions, devices, network, memory and limits, and try two ranks with a data plane.

    Exit code 0: in order, or only yellow; 2: something is red.
    """
    from nemo_rl.cluster.doctor.examine import examine, show, worst  # noqa: PLC0415 - psutil and packaging
    from nemo_rl.cluster.doctor.finding import State  # noqa: PLC0415

    console, findings = make_console(), []
    for finding in examine(with_self_test=self_test):
        findings.append(finding)
        if not as_json:
            show(finding, console)
    verdict = worst(findings)
    if as_json:
        document = {"format": FORMAT, "state": verdict, "findings": [finding.to_json() for finding in findings]}
        typer.echo(json.dumps(document, indent=2))
    raise typer.Exit(2 if verdict is State.RED else 0)
