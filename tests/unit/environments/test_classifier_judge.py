"""A reward model of transformers as a judge: its scores, its padding and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from nemo_rl.config.judges import JudgeConfig
from nemo_rl.environments.judges.classifier import ClassifierJudge
from nemo_rl.environments.judges.kept import KeptVerdicts
from nemo_rl.environments.judges.verdicts import Case
from nemo_rl.errors import ConfigError
from tests.helpers.conversations import small_tokenizer


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    return _reward_model(tmp_path / "model", kind=Qwen3ForSequenceClassification)


def _reward_model(folder: Path, *, kind: Any, num_labels: int = 1) -> Path:
    template = "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}{{ eos_token }}"
    tokenizer: Any = small_tokenizer(template)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        num_labels=num_labels,
    )
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _judge(folder: Path, **changes: Any) -> ClassifierJudge:
    judges = {"rm": JudgeConfig(kind="classifier", model=str(folder), **changes)}
    return ClassifierJudge("rm", judges["rm"], KeptVerdicts(None, judges))


def test_scores_are_those_of_transformers_at_the_last_token(folder: Path) -> None:
    """transformers reads the last token that is not the padding token: only without one is it the last of the row."""
    judge = _judge(folder)
    rows = [judge.token_ids("312", "123"), judge.token_ids("54321", "12345 "), judge.token_ids("1", "")]
    eos = judge._tokenizer.eos_token_id
    assert all(row[-1] == eos for row in rows), "rows end in the padding token"
    model = Qwen3ForSequenceClassification.from_pretrained(folder)
    as_it_is = [model(torch.tensor([row])).logits.item() for row in rows]
    model.config.pad_token_id = None
    expected = [model(torch.tensor([row])).logits.item() for row in rows]
    alone = [judge.scores([row])[0] for row in rows]
    torch.testing.assert_close(torch.tensor(alone), torch.tensor(expected))
    torch.testing.assert_close(torch.tensor(judge.scores(rows)), torch.tensor(alone))
    assert as_it_is != pytest.approx(expected), "pad = eos is a trap here"


def test_a_row_that_is_too_long_has_no_score(folder: Path) -> None:
    verdict = _judge(folder, max_tokens=4)._score(Case(prompt="12345", responses=("12345",)))
    assert verdict.scores is None and verdict.kind == "too_long"


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no weights of score\.weight"):
        _judge(_reward_model(tmp_path / "causal", kind=Qwen3ForCausalLM))
    with pytest.raises(ConfigError, match="num_labels 1"):
        _judge(_reward_model(tmp_path / "two", kind=Qwen3ForSequenceClassification, num_labels=2))
    other = _reward_model(tmp_path / "other", kind=Qwen3ForSequenceClassification)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64, "num_labels": 1}
    GPT2ForSequenceClassification(GPT2Config(**sizes)).save_pretrained(other)
    assert _judge(other).scores([[1, 2]]), "its head has another base, and the same name"
    classifier = BertForSequenceClassification(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64, num_labels=1)
    )
    classifier.save_pretrained(other)
    with pytest.raises(ConfigError, match="no head named 'score'"):
        _judge(other)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        _judge(tmp_path / "nothing")
