"""The result of a validation: per set of held-out prompts its measures, for logs, tables and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_rl.config.data import MAIN_SET
from nemo_rl.experience.evaluation.measures import REWARD, SetMeasures
from nemo_rl.utils.logger import VAL_ACCURACY_METRIC, VAL_REWARD_METRIC

__all__ = ["SetResult", "ValidationResult", "evaluation_lines"]

AREA, ACCURACY = VAL_ACCURACY_METRIC.split("/")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetResult:
    """The rewards of the responses to one set of prompts."""

    measures: SetMeasures
    is_accuracy: bool
    """True when rewards are 1 for right and 0 for wrong."""
    num_samples: int
    """Sampled responses to each prompt."""
    mean_response_tokens: float
    """Mean of the sampled responses, as the next two."""
    truncated_share: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Means of the parts of the reward."""
    num_left_out: int = 0
    """Prompts that are in no measure because a sample of theirs could not be scored."""

    @property
    def reward(self) -> float:
        return self.measures.measures[REWARD].value

    def metrics(self, area: str) -> dict[str, float]:
        """Return the numbers for a logger.

        Args:
            area: before the names, for example `val`.
        """
        metrics = {f"{area}/{ACCURACY}": self.reward} if self.is_accuracy else {}
        metrics |= _values(self.measures, area) | _ends(self.measures, area)
        for name, part in self.measures.categories.items():
            metrics |= _values(part, f"{area}/category/{name}")
        metrics |= {f"{area}/{REWARD}/{name}": mean for name, mean in self.components.items()}
        return metrics | {
            f"{area}/mean_response_tokens": self.mean_response_tokens,
            f"{area}/truncated_share": self.truncated_share,
            **({f"{area}/left_out_prompts": float(self.num_left_out)} if self.num_left_out else {}),
        }

    def as_record(self) -> dict[str, object]:
        return {
            **self.measures.as_record(),
            "num_samples": self.num_samples,
            "rewards_are_right_or_wrong": self.is_accuracy,
            # Of a component that was scored nowhere there is no mean, and JSON has no word for it.
            "components": {name: None if math.isnan(mean) else mean for name, mean in self.components.items()},
            "mean_response_tokens": self.mean_response_tokens,
            "truncated_share": self.truncated_share,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationResult:
    """All sets of held-out prompts."""

    sets: Mapping[str, SetResult]
    """Results by the name of the set; the main one is `validation`."""
    printed: tuple[str, ...] = ()
    """Lines of the reward for the person at the terminal."""

    @property
    def reward(self) -> float:
        return self.sets[MAIN_SET].reward

    def metrics(self) -> dict[str, float]:
        """Return the numbers for a logger: `val/...` of the main set, `val/NAME/...` of each further one."""
        metrics: dict[str, float] = {}
        for name, found in self.sets.items():
            metrics |= found.metrics(AREA if name == MAIN_SET else f"{AREA}/{name}")
        return metrics


def _values(part: SetMeasures, area: str) -> dict[str, float]:
    values = {f"{area}/{name}": each.value for name, each in part.measures.items()}
    return {f"{area}/num_prompts": float(part.num_prompts), **values}


def _ends(part: SetMeasures, area: str) -> dict[str, float]:
    """Return the ends of the intervals; one that is open has none."""
    ends = {f"{area}/{name}_low": each.low for name, each in part.measures.items()}
    ends |= {f"{area}/{name}_high": each.high for name, each in part.measures.items()}
    return {name: end for name, end in ends.items() if math.isfinite(end)}


assert f"{AREA}/{REWARD}" == VAL_REWARD_METRIC, "curves and checkpoints look for the reward under this name"


def evaluation_lines(sets: Mapping[str, SetResult], *, confidence: float) -> list[str]:
    """Columns are aligned; each measure is followed by its interval.

    Example:
        `validation      256  0.891 [0.846, 0.923]`
    """
    rows: list[tuple[str, SetMeasures]] = []
    for name, found in sets.items():
        rows.append((name, found.measures))
        rows += [(f"  {category}", part) for category, part in found.measures.categories.items()]
    measures = list(dict.fromkeys(measure for _, part in rows for measure in part.measures))
    cells = [["set", "prompts", *measures]]
    for name, part in rows:
        texts = [part.measures[measure].text() if measure in part.measures else "" for measure in measures]
        cells.append([name, str(part.num_prompts), *texts])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    samples = {found.num_samples for found in sets.values()}
    num = ", ".join(map(str, sorted(samples)))
    return [
        *lines,
        f"intervals hold the mean over such prompts with {confidence:.0%} confidence, and where there is one "
        f"prompt its mean over such samples; {num} samples a prompt",
    ]
