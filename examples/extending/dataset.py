"""A dataset of your own: digits to sort of which every one comes twice."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator

from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.datasets import RawPrompt

__all__ = ["twin_digits"]


def twin_digits(cfg: DatasetConfig, where: str, exclude: Collection[str]) -> Iterator[RawPrompt]:
    """Options: `pairs`, how many digits come twice.

    Args:
        cfg: the section of the recipe; `size`, `seed` and `options` are read.
        where: dotted path of the section, for messages.
        exclude: texts of the validation prompts, which training must not see.
    """
    drawn = random.Random(cfg.seed)
    pairs = int(cfg.options.get("pairs") or 2)
    for _ in range(cfg.size or 64):
        digits = [str(drawn.randrange(10)) for _ in range(pairs)] * 2
        drawn.shuffle(digits)
        text = "sort " + "".join(digits)
        if text not in exclude:
            yield RawPrompt(text=text, answer="".join(sorted(digits)))
