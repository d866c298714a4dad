"""Notes every process that imports it, for tests of the fork server."""

from __future__ import annotations

import os
from pathlib import Path

with Path(os.environ["NOTED_IMPORTS"]).open("a", encoding="utf-8") as noted:
    noted.write(f"{os.getpid()}\n")
