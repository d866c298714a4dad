"""docs/model_support.md names every type that transformers has, and says of a few what they do when they are tried."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.repo import model_support

PAGE = Path(__file__).parents[2] / "docs" / "model_support.md"
AGAIN = ("smollm3", "glm4_moe", "xlnet")
"""One that runs in every way, one that does in some, one that does not at all."""


def lines() -> dict[str, str]:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {row.split("|")[1].strip(): row for row in rows}


def test_the_page_has_a_line_for_every_type() -> None:
    assert set(lines()) - {"type", "---"} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "run make model-support"


@pytest.mark.parametrize("model_type", AGAIN)
def test_the_page_says_what_a_type_does(model_type: str) -> None:
    assert model_support.line_of(model_type, model_support.trials()) == lines()[model_type], "run make model-support"
