"""`examine`: every look at this machine, in order; and how the findings are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.text import Text

from nemo_rl.cluster.doctor.finding import Finding, State, red
from nemo_rl.cluster.doctor.machine import look_at_devices, look_at_machine
from nemo_rl.cluster.doctor.network import look_at_network, look_at_schedulers
from nemo_rl.cluster.doctor.packages import look_at_packages

__all__ = ["examine", "show", "worst"]

SIGNS = {State.GREEN: "ok", State.YELLOW: "look", State.RED: "bad"}


def _self_test() -> Iterator[Finding]:
    from nemo_rl.cluster.doctor.self_test import look_at_self_test  # noqa: PLC0415 - imports all that a worker does

    yield from look_at_self_test()


LOOKS: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
    ("packages", look_at_packages),
    ("machine", look_at_machine),
    ("devices", look_at_devices),
    ("network", look_at_network),
    ("schedulers", look_at_schedulers),
)


def examine(*, with_self_test: bool = True) -> Iterator[Finding]:
    """Findings as they are made; a look that fails is a finding, too."""
    for name, look in (*LOOKS, *([("self-test", _self_test)] if with_self_test else [])):
        try:
            yield from look()
        except Exception as error:  # noqa: BLE001 - a doctor who falls ill says so, and goes on
            first = (str(error).splitlines() or [""])[0]
            yield red(name, f"{type(error).__name__}: {first}", "this look itself failed; what it needs is broken")


def worst(findings: Iterable[Finding]) -> State:
    """Of all findings."""
    order = list(State)
    return max((finding.state for finding in findings), key=order.index, default=State.GREEN)


def show(finding: Finding, console: Console) -> None:
    """One line, and one more with what to do."""
    line = Text(f"{SIGNS[finding.state]:<5}", style=finding.state.value)
    console.print(line.append(f"{finding.name}: {finding.found}", style="default"), soft_wrap=True)
    if finding.advice:
        console.print(f"     -> {finding.advice}", soft_wrap=True, markup=False, highlight=False)
