"""`Balance`: the rates of both sides of an asynchronous run, and how many engines keep up with its trainer.

Engines and trainer work at the same time, so a step takes as long as the slower side, and then the refit. Both sides
are taken at the bounds of `plan`: peak arithmetic, memory and links. Invariant: engines are as full as the lookahead L
allows, that is with the rows of 1 + L steps, since the run starts groups as fast as it trains them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from nemo_rl.cluster.plan.batches import Batches

__all__ = ["Balance", "balance_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Seconds for the rows of one step, and tokens in a second, of full rows."""

    engines: int
    """Engines of the recipe."""
    generation_s: float
    training_s: float
    """Seconds of all passes of the policy workers and of the data plane."""
    refit_s: float
    engine_tokens_s: float
    """Response tokens in a second of one engine."""
    training_tokens_s: float
    """Tokens of rows, prompts included, in a second of all policy workers."""
    balanced_engines: int | None
    """Fewest engines that keep up with the trainer; None where no number of them does."""
    least_generation_s: float
    """Seconds of sampling with one group on each engine, which more engines do not shorten."""

    @property
    def binding(self) -> str:
        """Return the side that a step waits for."""
        return "engines" if self.generation_s > self.training_s else "trainer"

    @property
    def idle_share(self) -> float:
        """Return the share of a step, without its refit, in which the other side waits."""
        slower = max(self.generation_s, self.training_s)
        return 1 - min(self.generation_s, self.training_s) / slower if slower else 0.0

    @property
    def step_s(self) -> float:
        return max(self.generation_s, self.training_s) + self.refit_s

    @property
    def advice(self) -> str:
        """Return what would balance the sides."""
        if self.balanced_engines is None:
            return (
                f"no number of engines keeps up: the turns of a row take {self.least_generation_s:.2f} s, the trainer "
                f"{self.training_s:.2f} s; raise grpo.async.lookahead (and max_staleness), or take fewer policy workers"
            )
        if self.balanced_engines == self.engines:
            return f"{self.engines} engines keep up with the trainer, and fewer would not"
        other = "policy.generation.num_replicas, or give GPUs to the other side"
        return f"{self.balanced_engines} engines would keep up with the trainer, got {self.engines}; change {other}"

    def as_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "binding": self.binding,
            "idle_share": self.idle_share,
            "step_s": self.step_s,
            "advice": self.advice,
        }


def balance_of(
    batches: Batches,
    generation_s: Callable[[int], float],
    *,
    engines: int,
    most_engines: int,
    training_s: float,
    refit_s: float,
) -> Balance:
    """Return the balance of a layout.

    Args:
        generation_s: seconds in which so many engines sample the rows of one step.
        engines: of the recipe.
        most_engines: that can have a group at one time.
    """
    seconds = generation_s(min(engines, most_engines))
    keeps_up = (count for count in range(1, most_engines + 1) if generation_s(count) <= training_s)
    return Balance(
        engines=engines,
        generation_s=seconds,
        training_s=training_s,
        refit_s=refit_s,
        engine_tokens_s=batches.rows * min(batches.response_tokens, batches.row_tokens) / seconds / engines,
        training_tokens_s=batches.tokens / training_s,
        balanced_engines=next(keeps_up, None),
        least_generation_s=generation_s(most_engines),
    )
