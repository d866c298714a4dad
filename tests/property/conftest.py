"""The first example pays for imports, and other work shares the cores: time is no property of what is tested."""

from __future__ import annotations

from hypothesis import settings

from tests.helpers.case_selection import num_examples

settings.register_profile("untimed", deadline=None, max_examples=num_examples())
settings.load_profile("untimed")
