"""What a chat template makes of turns is known before a run."""

from __future__ import annotations

import pytest

from nemo_rl.data.template_check import check_template, role_patterns
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.data.turn_encoder import TurnEncoder
from tests.helpers.chat_templates import CASES, CORPUS, NOW, stop_ids_of, tokenizer_of

SEAM = "seam ['\\n']"
CUT = "seam ['<|im_end|>', '\\n']"
EXPECTED = {
    "chatml": {"user reply": SEAM, "user reply to a cut turn": CUT, "parallel tool results": SEAM},
    "smollm2": {"user reply": SEAM, "user reply to a cut turn": CUT, "tool result, then user": SEAM},
    "llama3": {
        "user reply": "append",
        "user reply to a cut turn": "seam ['<|eot_id|>']",
        "tool result": "append",
        "parallel tool results": "append",
        "tool result to thoughts": "new_row, the template drops '<think>\\n2+2=4\\n</think>\\n\\n'",
    },
    "qwen3": {
        "user reply": SEAM,
        "user reply to thoughts": "new_row, the template drops '<think>\\n2+2=4\\n</think>\\n\\n'",
        "tool result to thoughts": SEAM,
        "parallel tool results": SEAM,
        "tool result, then user": SEAM,
        "tool result, then user, with a control token in its text": SEAM,
    },
    "gpt_oss": {
        "user reply": "append",
        "user reply to a cut turn": "seam ['<|end|>']",
        "user reply to thoughts": (
            "new_row, the template drops 'analysis<|message|>2+2=4<|end|><|start|>assistant<|channel|>'"
        ),
        "tool result to thoughts": "append",
        "parallel tool results": "append",
        "tool result, then user, with a control token in its text": "append",
    },
}


@pytest.mark.parametrize("name", CASES)
def test_every_pattern_of_roles_is_told_with_its_tokens(name: str) -> None:
    encoder = TurnEncoder(tokenizer_of(name), stop_ids=stop_ids_of(name), now=NOW)
    patterns = role_patterns(tools=["calculator", "lookup"], max_parallel_calls=8)
    lines = [found.line() for found in check_template(encoder, tokenizer_of(name), patterns)]
    found = dict(line.split(": ", 1) for line in lines)
    assert found | EXPECTED[name] == found and len(found) == len(patterns) + 1
    assert (found["user reply to thoughts"][:7] == "new_row") == (name in ("qwen3", "gpt_oss"))


def test_a_template_without_a_form_for_tools_is_refused_with_its_reason() -> None:
    made = build_tokenizer([CORPUS])
    refusal = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endfor %}"
    made.chat_template = refusal + CASES["chatml"].template
    encoder = TurnEncoder(made, stop_ids=(2,), now=NOW)
    found = {check.name: check for check in check_template(encoder, made, role_patterns(tools=["calculator"]))}
    assert found["user reply"].verdict == "seam" and found["tool result"].verdict == "refused"
    assert "no tools here" in found["tool result"].line() and found["tool result"].is_needed
    assert not found["tool result without a call"].is_needed


def test_only_what_the_recipe_can_produce_is_looked_at() -> None:
    names = [pattern.name for pattern in role_patterns(tools=["a"], has_replies=False, has_thoughts=False)]
    assert names == ["tool result", "tool result without a call"]
    assert role_patterns(has_replies=False) == ()
