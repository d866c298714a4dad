"""The packages of this repository that users install, for checks of their source."""

from __future__ import annotations

from pathlib import Path

__all__ = ["LIBRARY", "ROOT", "ROOTS", "SOURCES"]

ROOT = Path(__file__).parents[2]
ROOTS = ("nemo_rl", "nemo_rl_tools")
LIBRARY = sorted(path for name in ROOTS for path in (ROOT / name).rglob("*.py"))
SOURCES = [*LIBRARY, *sorted(path for name in ("examples", "benchmarks") for path in (ROOT / name).rglob("*.py"))]
