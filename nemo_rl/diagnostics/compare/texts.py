"""Texts of tokens, where a recording says which tokenizer it had and its folder is still there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from nemo_rl.errors import UserError, boundary, shorten

__all__ = ["token_texts"]

TEXT_SHOWN = 40


def token_texts(tokenizer: str, tokens: Iterable[int]) -> tuple[Mapping[int, str], str | None]:
    """Token -> text, and why there is none; an empty folder name has neither."""
    wanted = sorted(set(tokens))
    if not tokenizer or not wanted:
        return {}, None
    if not Path(tokenizer).is_dir():
        return {}, f"no texts of tokens: {tokenizer} is no folder"
    from nemo_rl.data.tokenizer import load_tokenizer  # noqa: PLC0415 - transformers takes seconds to import

    try:
        loaded = load_tokenizer(tokenizer)
        with boundary(UserError, f"tokenizer {tokenizer!r}"):
            known = [token for token in wanted if 0 <= token < len(loaded)]
            return {token: shorten(str(loaded.decode([token])), limit=TEXT_SHOWN) for token in known}, None
    except UserError as error:
        return {}, f"no texts of tokens: {error}"
