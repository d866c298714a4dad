"""`TokenTexts`: what token ids stand for, by the `tokenizer.json` of a folder; empty without one.

Invariant: the texts of a table fit into the header of a frame.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["TokenTexts"]

logger = logging.getLogger(__name__)

MAX_TEXTS_BYTES = 512 << 10
"""Of one table, as JSON: half of what a header may have; the texts of further tokens are left out."""
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in vocabularies of SentencePiece; decoding one token alone loses it."""


class TokenTexts:
    """Texts of single tokens, each decoded once."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._is_loaded = folder, folder is None
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}

    def load(self) -> None:
        """Reads the vocabulary, which may take a second; a folder without one is told in the log, once."""
        if self._is_loaded:
            return
        self._is_loaded = True
        try:
            # Here: it is needed only where tokens are shown.
            from tokenizers import Tokenizer  # noqa: PLC0415

            self._tokenizer = Tokenizer.from_file(f"{self._folder}/tokenizer.json")
        except Exception as error:  # noqa: BLE001 - the library raises plain `Exception`; pictures are good without texts
            logger.warning("no token texts: %s/tokenizer.json: %s", self._folder, str(error)[:300])

    def of(self, ids_R: np.ndarray) -> dict[str, str]:
        """Token id as a text -> text, of those that are known."""
        if self._tokenizer is None:
            return {}
        found, num_bytes = {}, 0
        for token in np.unique(ids_R).tolist():
            if token not in self._texts:
                self._texts[token] = _decode(self._tokenizer, token)
            text = self._texts[token]
            num_bytes += len(json.dumps(text)) + len(str(token)) + 6
            if num_bytes > MAX_TEXTS_BYTES:
                break
            found[str(token)] = text
        return found


def _decode(tokenizer: Any, token: int) -> str:
    piece = tokenizer.id_to_token(token) if token >= 0 else None
    if piece is None:
        return ""
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    return f" {text}" if piece.startswith(WORD_START) and not text.startswith(" ") else text
