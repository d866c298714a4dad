"""Records of a receipt: how it is to be taken and when, the rows that are scored, the answers, and what was found.

`Probe` holds the fixed rows of tokens that engines and policy score after a refit, the same in every run of the same
model. Two prompts are longer than a block of a prefix cache and have two rows each, the second of which finds the first
one's blocks; the others are short. So a cache that has kept keys and values of old weights shows in every receipt but
the first. `ProbeTurns` chooses the refits whose probe is scored: fingerprints are compared after every refit, but
scoring takes a few forward passes, which is nothing beside the minutes of a real step and too much beside the second of
a toy's. Invariant: no number of a training depends on a turn.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import GenerationRequest, SamplingParams
from nemo_rl.utils.console import bytes_text

__all__ = [
    "LONG",
    "Answer",
    "Probe",
    "ProbeTurns",
    "Receipt",
    "ReceiptSpec",
    "RefitReport",
    "ScoredProbe",
    "Sent",
    "Tolerance",
    "make_probe",
]

NUM_ROWS = 6
LONG, LESS_LONG, SHORT, SHORTEST = 38, 35, 17, 5
"""Tokens of the prompts. The largest block that vLLM takes by itself has 32 on a CPU and 16 on a GPU."""
SEED = 77


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Rows of a prompt and a response that is given, token by token; one prompt has one response."""

    prompts: tuple[tuple[int, ...], ...]
    """Prompt of each row; rows of one prompt follow each other."""
    responses: tuple[tuple[int, ...], ...]

    @property
    def families(self) -> tuple[tuple[int, ...], ...]:
        """Return places of the tokens, in the responses laid end to end, of all rows of one prompt: they err
        together."""
        places: dict[tuple[int, ...], list[int]] = {}
        start = 0
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            places.setdefault(prompt, []).extend(range(start, start + len(response)))
            start += len(response)
        return tuple(map(tuple, places.values()))

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for response in self.responses for token in response)

    @property
    def is_first(self) -> tuple[bool, ...]:
        """Return whether each row is the first of its prompt: no prefix cache may know it."""
        return tuple(prompt not in self.prompts[:row] for row, prompt in enumerate(self.prompts))

    def request(self) -> GenerationRequest:
        """Return the request for an engine: the tokens are forced through its decode path."""
        return GenerationRequest(
            prompt_ids=self.prompts,
            seeds=tuple(range(len(self.prompts))),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=max(map(len, self.responses)), stop_token_ids=()),
            forced=self.responses,
        )

    def mixed(self, versions: Sequence[int]) -> GenerationRequest:
        """Return the request for every row under each of these versions of an adapter, side by side."""
        count = len(versions)
        return replace(
            self.request(),
            prompt_ids=tuple(prompt for prompt in self.prompts for _ in versions),
            seeds=tuple(range(len(self.prompts) * count)),
            forced=tuple(response for response in self.responses for _ in versions),
            adapters=tuple(versions) * len(self.prompts),
        )

    def spread(self, scored: Sequence[float]) -> tuple[float, ...]:
        """Return one number for each of `token_ids`, of numbers for those of the rows of `batch`."""
        of_prompt, start = dict[tuple[int, ...], Sequence[float]](), 0
        for prompt, response in self._distinct().items():
            of_prompt[prompt] = scored[start : start + len(response)]
            start += len(response)
        return tuple(number for prompt in self.prompts for number in of_prompt[prompt])

    def _distinct(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Return prompt -> response."""
        return dict(zip(self.prompts, self.responses, strict=True))

    def batch(self) -> BatchedDataDict:
        """Return the batch for the policy: every prompt once; `token_mask` marks the responses."""
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
    """Return rows of random tokens.

    Args:
        max_length: of a row.
        num_tokens: of all responses together, at least; as many as fit where that is less.
        left_out: ids with their own meaning, such as the place of an image.
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


FIRST_TURNS = 4
"""Refits that are always scored, and whose cost is one of the start."""
MOST_SHARE = 0.015
"""Most of the time since then that receipts may take, as a fraction; the rest of 2 % is for what their clocks do not
see, such as fingerprints that are taken while weights are sent."""
LONGEST_WAIT = 10
"""Refits from one turn to the next at the most, whatever they take."""


class ProbeTurns:
    """Chooses the refits after which the probe is scored.

    Args:
        every: a turn every so many refits; None: after each, as long as `MOST_SHARE` allows.
        clock: seconds.
    """

    def __init__(self, every: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._num_done = self._last = 0
        self._began = clock()
        self._spent_s = self._cost_s = 0.0

    def is_due(self) -> bool:
        """Return whether the probe is scored after the refit that is being done."""
        if self._every is not None:
            return self._num_done % self._every == 0
        if self._num_done < FIRST_TURNS or self._num_done - self._last >= LONGEST_WAIT:
            return True
        return self._spent_s + self._cost_s <= MOST_SHARE * (self._clock() - self._began)

    def done(self, seconds: float, *, has_probe: bool) -> None:
        """Count a refit that was proved.

        Args:
            seconds: that its receipt took.
            has_probe: whether the probe was scored for it.
        """
        if has_probe:
            self._last, self._cost_s = self._num_done, seconds
        self._num_done += 1
        self._spent_s += seconds
        if self._num_done == FIRST_TURNS:
            self._began, self._spent_s = self._clock(), 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiptSpec:
    """Settings of the receipts of a run."""

    probe: Probe
    every: int | None
    """Syncs from one with the probe to the next; None: as `ProbeTurns` has it. Fingerprints are compared after each."""
    tolerance: float | None
    """Largest mean difference of log-probabilities; None: measured at the first sync."""
    precision: str
    """The lower one of policy and engine, such as `bfloat16`."""
    has_experts: bool
    """True where a router may choose otherwise for a token where two experts are nearly equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """The bytes and fingerprints that a rank of the policy has sent in a refit."""

    num_bytes: int
    """Bytes that were put into its buffer."""
    fingerprints: Mapping[str, str]
    """Name of a weight in Hugging Face naming -> fingerprint in the engines' dtype; rank 0 has them where receipts
    are taken."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Name -> hash of all parts of the weight that this rank has sent; of refits by shards alone."""
    merge_loss: float | None = None
    """Share of the adapter that rounding to the engines' dtype has lost; None where none was merged into weights."""

    @property
    def digest(self) -> str:
        text = "\n".join(f"{name} {print_}" for name, print_ in sorted(self.fingerprints.items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredProbe:
    """The probe as a rank of the policy scores it."""

    logprobs: tuple[float, ...]
    """Log-probabilities of the responses, laid end to end; none on ranks that write no results."""
    seconds: float
    """Seconds that the scoring took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An engine's report of itself after a refit."""

    fingerprints: Mapping[str, str]
    """Name of a weight in Hugging Face naming -> fingerprint, as it lies in the engine or was handed to it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Name -> that of the sent weight that it is tied to, for names that are not sent."""
    version: int
    """Version of the weights that have scored the probe."""
    token_ids: tuple[int, ...] = ()
    """Tokens of the responses, laid end to end; none without a probe."""
    logprobs: tuple[float, ...] = ()
    cached_tokens: tuple[int, ...] = ()
    """Tokens of each row's prompt that a prefix cache had; none where the engine does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Mean differences of log-probabilities: the largest that are found, or allowed."""

    of_policy: float
    """Largest difference between an engine and the policy."""
    of_replicas: float
    """Largest difference between engines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """A refit that was proved."""

    version: int
    num_engines: int
    num_tensors: int
    seconds: float
    gap: float | None = None
    """Mean difference of log-probabilities between engine and policy, of the engine that is furthest; None where the
    probe was left out."""
    replica_gap: float | None = None
    """The same between engines."""
    moved: float | None = None
    """Mean change of the policy's own log-probabilities of the probe since it was scored last."""
    tolerance: Tolerance | None = None
    cached_tokens: int = 0
    weights: str = ""
    """Digest of the fingerprints of all weights that were sent."""

    @property
    def tells_versions(self) -> bool:
        """Return whether an engine that samples from the weights before would be further away than is allowed."""
        return self.moved is None or self.tolerance is None or self.moved > self.tolerance.of_policy

    def text(self) -> str:
        """Return a few words for the terminal.

        Example:
            >>> Receipt(version=3, num_engines=2, num_tensors=52, seconds=0.01).text()
            'receipt ok'
            >>> limits = Tolerance(of_policy=0.12, of_replicas=0.01)
            >>> Receipt(version=3, num_engines=2, num_tensors=52, seconds=0.01, gap=0.02, moved=0.001,
            ...         tolerance=limits).text()
            'receipt ok, gap 2.0e-02 (stale weights known by fingerprint alone: the update moved 1.0e-03)'
        """
        if self.gap is None:
            return "receipt ok"
        alone = f" (stale weights known by fingerprint alone: the update moved {self.moved or 0.0:.1e})"
        return f"receipt ok, gap {self.gap:.1e}{'' if self.tells_versions else alone}"

    def tolerance_text(self) -> str:
        """Return a line for the terminal, after the first refit.

        Example:
            >>> limits = Tolerance(of_policy=0.12, of_replicas=0.01)
            >>> Receipt(version=0, num_engines=2, num_tensors=52, seconds=0.01, gap=0.02, replica_gap=0.0,
            ...         tolerance=limits).tolerance_text()
            'receipts: engines are 0.02 from the policy with the same weights; tolerance 0.12, between engines 0.01'
        """
        if self.gap is None or self.tolerance is None:
            return "receipts: weights alone were compared"
        limits = self.tolerance
        return (
            f"receipts: engines are {self.gap:.2g} from the policy with the same weights; tolerance "
            f"{limits.of_policy:.2g}, between engines {limits.of_replicas:.2g}"
        )

    def metrics(self) -> dict[str, float]:
        """Return the numbers that a run logs under `refit/`."""
        found = {"receipt_ms": self.seconds * 1e3, "receipt_tensors": float(self.num_tensors)}
        if self.gap is not None and self.replica_gap is not None and self.tolerance is not None:
            found |= {
                "receipt_gap": self.gap,
                "receipt_replica_gap": self.replica_gap,
                "receipt_tolerance": self.tolerance.of_policy,
                "receipt_cached_tokens": float(self.cached_tokens),
            }
            if self.moved is not None:
                found["receipt_moved"] = self.moved
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitReport:
    """One refit that succeeded."""

    version: int
    ms: float
    """Milliseconds from the first call to the last answer of the engines, without those of the receipt."""
    bytes_dense: int
    """Bytes of all weights in the engines' dtypes; where engines serve adapters those of the adapter, and of the frozen
    weights where these were sent."""
    bytes_sent: int
    """Bytes that policy rank 0 put into buckets, or by shards all of its ranks together; each engine gets them."""
    receipt: Receipt | None = None
    """Receipt of the refit, or None where none was taken."""
    num_adapters: int | None = None
    """Most versions of an adapter that an engine holds; None where engines serve none."""
    merge_loss: float | None = None
    """Share of the adapter that merging has lost, as `Sent` has it."""

    def text(self) -> str:
        """Return a few words for the terminal.

        Example:
            >>> RefitReport(version=1, ms=31.7, bytes_dense=1 << 20, bytes_sent=1 << 20).text()
            '32 ms/1MiB'
        """
        whole = "" if self.bytes_sent == self.bytes_dense else f" of {bytes_text(self.bytes_dense)}"
        moved = f"{self.ms:.0f} ms/{bytes_text(self.bytes_sent)}{whole}"
        return moved if self.receipt is None else f"{moved}, {self.receipt.text()}"

    def metrics(self) -> dict[str, float]:
        proved = {} if self.receipt is None else self.receipt.metrics()
        return {
            "refit/ms": self.ms,
            "refit/bytes_dense": float(self.bytes_dense),
            "refit/bytes_sent": float(self.bytes_sent),
            **({} if self.num_adapters is None else {"refit/num_adapters": float(self.num_adapters)}),
            **({} if self.merge_loss is None else {"refit/lora_merge_loss": self.merge_loss}),
            **{f"refit/{name}": value for name, value in proved.items()},
        }
