"""Texts of single tokens and the numbers that readable rollouts have of them."""

from __future__ import annotations

import json

import torch

from nemo_rl.utils.rollout_file import TokenTexts, row_texts, token_record


class Bytes:
    """A tokenizer of bytes, whose characters may take several tokens."""

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


class Words:
    """A tokenizer that leaves out the space in front of the first word, as SentencePiece's do."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f" word{token}" for token in token_ids).removeprefix(" ")


def test_the_last_token_of_a_character_has_it_and_all_texts_together_are_the_text() -> None:
    text = "a\u00e9\u4e2d\U0001f600b"
    texts = TokenTexts(Bytes()).of(list(text.encode()))
    assert texts == ["a", "", "\u00e9", "", "", "\u4e2d", "", "", "", "\U0001f600", "b"]
    assert "".join(texts) == text


def test_half_a_character_stays_what_the_tokenizer_says() -> None:
    assert TokenTexts(Bytes()).of([0xF0, 0x9F, ord("x"), 0xE4]) == ["\ufffd", "\ufffd", "x", "\ufffd"]


def test_a_space_in_front_of_a_word_is_kept() -> None:
    assert TokenTexts(Words()).of([1, 2, 1]) == [" word1", " word2", " word1"]


def test_only_trained_tokens_have_log_probabilities() -> None:
    record = token_record(
        TokenTexts(Words()),
        [1, 2, 3],
        mask=torch.tensor([False, True, True]),
        generation_logprobs=torch.tensor([0.0, -0.123456789, float("-inf")]),
        prev_logprobs=torch.tensor([-9.0, -0.0000123456789, float("nan")]),
    )
    assert record["generation_logprobs"] == [None, -0.12346, "-inf"] and record["token_mask"] == [0, 1, 1]
    assert record["prev_logprobs"] == [None, -1.2346e-05, "nan"]
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_the_replies_of_a_conversation_stand_in_its_response() -> None:
    ids, mask = torch.tensor(list(b"ask: yes? no")), torch.zeros(12, dtype=torch.bool)
    assert row_texts(Bytes(), ids, mask) == {"prompt": "ask: yes? no", "response": ""}
    mask[5:8], mask[10:] = True, True
    assert row_texts(Bytes(), ids, mask) == {"prompt": "ask: ", "response": "yes? no"}
