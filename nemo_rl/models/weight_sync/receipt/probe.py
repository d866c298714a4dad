"""`Probe`: the fixed rows of tokens that engines and policy score after a refit.

Made by the driver once. Two prompts are longer than a block of a prefix cache and have two rows each, the second of
which finds the first one's blocks; the others are short. So a cache that has kept keys and values of old weights shows
in every receipt but the first. Invariant: the same rows in every run of the same model.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams

__all__ = ["Probe", "make_probe"]

NUM_ROWS = 6
LONG, LESS_LONG, SHORT, SHORTEST = 38, 35, 17, 5
"""Tokens of the prompts. The largest block that vLLM takes by itself has 32 on a CPU and 16 on a GPU."""
SEED = 77


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Rows of a prompt and a response that is given, token by token; one prompt has one response."""

    prompts: tuple[tuple[int, ...], ...]
    """Of each row; rows of one prompt follow each other."""
    responses: tuple[tuple[int, ...], ...]

    @property
    def families(self) -> tuple[tuple[int, ...], ...]:
        """Places of the tokens, in the responses laid end to end, of all rows of one prompt: they err together."""
        places: dict[tuple[int, ...], list[int]] = {}
        start = 0
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            places.setdefault(prompt, []).extend(range(start, start + len(response)))
            start += len(response)
        return tuple(map(tuple, places.values()))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the responses, laid end to end."""
        return tuple(token for response in self.responses for token in response)

    @property
    def is_first(self) -> tuple[bool, ...]:
        """Whether a row is the first of its prompt: no prefix cache may know it."""
        return tuple(prompt not in self.prompts[:row] for row, prompt in enumerate(self.prompts))

    def request(self) -> GenerationRequest:
        """For an engine: the tokens are forced through its decode path."""
        return GenerationRequest(
            prompt_ids=self.prompts,
            seeds=tuple(range(len(self.prompts))),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=max(map(len, self.responses)), stop_token_ids=()),
            forced=self.responses,
        )

    def spread(self, scored: Sequence[float]) -> tuple[float, ...]:
        """One number for each of `token_ids`, of numbers for those of the rows of `batch`."""
        of_prompt, start = dict[tuple[int, ...], Sequence[float]](), 0
        for prompt, response in self._distinct().items():
            of_prompt[prompt] = scored[start : start + len(response)]
            start += len(response)
        return tuple(number for prompt in self.prompts for number in of_prompt[prompt])

    def _distinct(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Prompt -> response."""
        return dict(zip(self.prompts, self.responses, strict=True))

    def batch(self) -> BatchedDataDict:
        """For the policy: every prompt once; `token_mask` marks the responses."""
        prompts, responses = zip(*self._distinct().items(), strict=True)
        rows = [(*prompt, *response) for prompt, response in zip(prompts, responses, strict=True)]
        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        places = torch.arange(width)
        starts = torch.tensor([len(prompt) for prompt in prompts])
        return BatchedDataDict(
            {
                "input_ids": torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32),
                "input_lengths": lengths,
                "token_mask": (places >= starts[:, None]) & (places < lengths[:, None]),
                "sample_mask": torch.ones(len(rows)),
                "keys": [f"receipt_g{row}" for row in range(len(rows))],
            }
        )


def make_probe(*, vocab_size: int, max_length: int, num_tokens: int, left_out: Collection[int] = ()) -> Probe:
    """Rows of random tokens.

    Args:
        max_length: of a row.
        num_tokens: of all responses together, at least; as many as fit where that is less.
        left_out: ids with a meaning of their own, such as the place of an image.
    """
    rng = random.Random(SEED)
    ids = [token for token in range(vocab_size) if token not in left_out] or list(range(vocab_size))
    new = max(1, min(-(-num_tokens // NUM_ROWS), max_length - 1))

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.choice(ids) for _ in range(count))

    long, less_long, short, shortest = [
        draw(_cut(length, max_length - new)) for length in (LONG, LESS_LONG, SHORT, SHORTEST)
    ]
    rows = (long, long, less_long, less_long, short, shortest)
    responses = {prompt: draw(new) for prompt in rows}
    return Probe(prompts=rows, responses=tuple(responses[prompt] for prompt in rows))


def _cut(length: int, room: int) -> int:
    return max(1, min(length, room))
