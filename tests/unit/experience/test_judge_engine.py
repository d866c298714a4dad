"""A judge in an engine of the run's own: its texts, tokens and failures, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nemo_rl.config.env import EnvConfig
from nemo_rl.config.judges import JudgeConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import EnvReport, Response
from nemo_rl.environments.judges.environment import JudgeEnvironment
from nemo_rl.environments.process_environment import build_environment
from nemo_rl.errors import ConfigError
from tests.helpers.conversations import small_tokenizer

VERDICT = '{"score": 7}'
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
PROMPT = Prompt(index=0, text="2 + 2", answer="4", ids=(), metadata={})


def write_model(folder: Path, *, says_verdicts: bool, template: str | None = TEMPLATE) -> Path:
    """Write a model that says VERDICT and ends, whatever it is asked, or one with random weights."""
    tokenizer: Any = small_tokenizer(template or TEMPLATE)
    tokenizer.chat_template = template
    tokenizer.add_tokens([VERDICT])
    verdict, end = tokenizer.convert_tokens_to_ids(VERDICT), tokenizer.eos_token_id
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
        eos_token_id=end,
        pad_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    if says_verdicts:
        # Every token but the verdict has one direction, the verdict another; the layer adds nothing.
        with torch.no_grad():
            layer = model.model.layers[0]
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, model.lm_head.weight):
                weight.zero_()
            model.model.embed_tokens.weight.zero_()[:, 0] = 1.0
            model.model.embed_tokens.weight[verdict] = torch.eye(16)[1]
            model.lm_head.weight[verdict, 0] = model.lm_head.weight[end, 1] = 10.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scored(folder: Path, model: Path, texts: tuple[str, ...], **changes: Any) -> EnvReport:
    judge = JudgeConfig(kind="engine", model=str(model), rubric="Is it right?", retries=1, **changes)
    config = EnvConfig(name="judge", judges={"own": judge})
    environment = build_environment(config, start_timeout_s=60, log_file=folder / "reward.log")
    assert isinstance(environment, JudgeEnvironment)
    try:
        return environment.score([PROMPT] * len(texts), [Response(text=text, num_tokens=1) for text in texts])
    finally:
        environment.shutdown()


def test_its_texts_are_verdicts_with_their_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", says_verdicts=True)
    report = scored(tmp_path, model, ("4", "5", "4"))
    assert report.rewards == (0.7, 0.7, 0.7) and not any(report.unscored)
    assert report.metrics["judge/own/asked"].value == 2 and report.metrics["judge/own/kept"].value == 1
    assert report.metrics["judge/own/tokens"].value > 100, "the request has been counted as well"
    assert VERDICT in (tmp_path / "verdicts.jsonl").read_text().replace("\\", "")
    again = scored(tmp_path, model, ("4", "5"))
    assert again.rewards == (0.7, 0.7) and again.metrics["judge/own/asked"].value == 0


def test_a_text_without_a_verdict_is_tried_again_and_gives_no_reward(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", says_verdicts=False)
    report = scored(tmp_path, model, ("4",), max_tokens=4)
    assert report.unscored[0] and report.metrics["judge/own/failed/unreadable"].value == 1
    assert report.metrics["judge/own/further_tries"].value == 1


def test_a_request_that_the_model_cannot_take_is_a_failure(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", says_verdicts=True)
    report = scored(tmp_path, model, ("4" * 5000,))
    assert "tokens of a request" in report.unscored[0] and report.metrics["judge/own/failed/too_long"].value == 1


def test_what_is_no_chat_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.judges\.own\.model"):
        scored(tmp_path, tmp_path / "missing", ("4",))
    with pytest.raises(ConfigError, match="no chat template"):
        scored(tmp_path, write_model(tmp_path / "model", says_verdicts=True, template=None), ("4",))
