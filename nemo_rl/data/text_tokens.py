"""Token ids of rendered text and of foreign text, and the control tokens that foreign text must not become.

Called by the chat template's encoder. Invariant: `foreign` gives no control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.errors import DatasetError, ModelFolderError

__all__ = ["TextTokens"]

MARKER_LENGTH = 64
"""Characters of the longest marker, such as `[INST]`, that is looked for in a template."""
_MARKERS = re.compile(rf"<[^<>\s]{{1,{MARKER_LENGTH}}}>|\[[^\[\]\s]{{1,{MARKER_LENGTH}}}\]")
# Before a piece of a text, so that a tokenizer that begins every text with a blank does not put one into its middle.
_ANCHORS = ("\n", "x", ".")


class TextTokens:
    """A tokenizer, and what a chat template makes of its tokens.

    Control tokens are special tokens, other added tokens that look like a marker (`<think>`, `[INST]`) or that the
    template uses, and markers of the template that are a token of the vocabulary alone.

    Args:
        template: text of the chat template; empty without one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, template: str = "") -> None:
        self.tokenizer, self._template = tokenizer, template

    @cached_property
    def control_ids(self) -> frozenset[int]:
        tokenizer = self.tokenizer
        found = set(tokenizer.all_special_ids)
        for token, added in tokenizer.added_tokens_decoder.items():
            is_used = added.content in self._template and not added.content.isspace()
            if added.special or is_used or _is_marker(added.content):
                found.add(token)
        for marker in set(_MARKERS.findall(self._template)):
            # A token of the vocabulary alone, perhaps one that holds the blank before it.
            ids = {*self.rendered(marker), *self.rendered(f"x {marker}")}
            found |= {token for token in ids if tokenizer.decode([token]).strip() == marker}
        # An unknown character is no control token, unless the tokenizer says it with one.
        if tokenizer.unk_token_id not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            found.discard(tokenizer.unk_token_id)
        return frozenset(found)

    def controls_in(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Return the control tokens among the ids, in their order."""
        return tuple(token for token in ids if token in self.control_ids)

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that the tokenizer puts before a text by itself."""
        probe = "a"
        bare, whole = self.rendered(probe), list(self.tokenizer(probe)["input_ids"])
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return tuple(whole[:start])
        raise ModelFolderError(
            f"tokenizer {self.tokenizer.name_or_path!r}: expected tokens before and after a text alone, got {whole} "
            f"for {probe!r}, whose own tokens are {bare}"
        )

    def rendered(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def foreign(self, text: str, *, is_first: bool) -> list[int]:
        """Return the tokens of a text, none of which is a control token.

        Raises:
            DatasetError: the tokenizer has no other tokens for it.
        """
        ids = self.piece(text, is_first=is_first, as_text=True)
        if not self.controls_in(ids):
            return ids
        cuts = self._cuts(text)
        if not cuts:
            raise DatasetError(
                f"prompt {text[:80]!r}: the tokenizer can write it as a control token only; remove it from the prompt"
            )
        found: list[int] = []
        for start, end in pairwise((0, *cuts, len(text))):
            found += self.foreign(text[start:end], is_first=is_first and start == 0)
        return found

    def piece(self, text: str, *, is_first: bool, as_text: bool) -> list[int]:
        """Return the tokens of a piece of a prompt; `as_text`: special tokens in it are no tokens, other added ones
        still are."""
        if not text:
            return []
        for anchor in () if is_first else _ANCHORS:
            before = list(self._encoded(anchor, as_text=as_text)["input_ids"])
            if self.tokenizer.unk_token_id in before:
                continue
            ids = list(self._encoded(anchor + text, as_text=as_text)["input_ids"])
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return list(self._encoded(text, as_text=as_text)["input_ids"])

    def _cuts(self, text: str) -> list[int]:
        """Return the positions at which the text is cut so that none of its control tokens stays whole."""
        given = self._encoded(text, as_text=True, return_offsets_mapping=self.tokenizer.is_fast)
        if not self.tokenizer.is_fast:
            return [len(text) // 2] if len(text) > 1 else []
        spans = zip(given["input_ids"], given["offset_mapping"], strict=True)
        cuts = {start + 1 for token, (start, _) in spans if token in self.control_ids}
        return sorted(cut for cut in cuts if 0 < cut < len(text))

    def _encoded(self, text: str, *, as_text: bool, **options: bool) -> Any:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=as_text, **options)


def _is_marker(text: str) -> bool:
    """Return whether a token is written like a control token: `<think>`, `[INST]`, `<|im_end|>`, and no word or white
    space."""
    core = text.strip()
    has_signs = len(core) > 2 and not core[0].isalnum() and not core[-1].isalnum()
    return has_signs and any(map(str.isalnum, core))
