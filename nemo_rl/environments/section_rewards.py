"""`SectionRewards`: an environment of one each for sections of `data` whose rows have a reward of their own.

Called by the rollout worker like any environment that scores. Invariant: a row is scored by the environment of the
section that its prompt comes from, and by no other one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from threading import Lock

from nemo_rl.config.env import EnvConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.environments.interfaces import ChecksAnswers, Environment, EnvReport, Response, waits_for_others
from nemo_rl.environments.process_environment import build_environment, reward_identity
from nemo_rl.errors import RewardError
from nemo_rl.utils.metrics import merge_metrics

__all__ = ["SectionRewards", "build_rewards"]

DEFAULT = "env"
"""Path of the section that scores the rows of all sections of `data` without one of their own."""
_WAITING_CALLS = 64
"""Calls at one time of each environment, where some wait for others."""


class SectionRewards:
    """Scores each row with the environment of its section.

    Args:
        environments: by the dotted path of their sections, such as `env` and `data.train.math.env`.
    """

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        self._environments = environments
        self.overlaps = any(map(waits_for_others, environments.values()))
        """See `WaitsForOthers`."""
        calls = len(environments) * (_WAITING_CALLS if self.overlaps else 1)
        self._pool = ThreadPoolExecutor(calls, thread_name_prefix="rewards")
        self._locks = {id(each): Lock() for each in environments.values() if not waits_for_others(each)}

    def of(self, section: str) -> Environment:
        """Return the environment of the rows of a section of `data`."""
        own = self._environments.get(f"{section}.{DEFAULT}")
        return self._environments[DEFAULT] if own is None else own

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> EnvReport:
        """Score all rows, those of each environment at the same time; a component of others is NaN.

        Raises:
            RewardError: scoring failed, or environments give different columns.
        """
        rows: dict[int, list[int]] = {}
        found = [self.of(prompt.section) for prompt in prompts]
        for row, environment in enumerate(found):
            rows.setdefault(id(environment), []).append(row)
        calls = [
            self._pool.submit(
                self._score, found[own[0]], [prompts[row] for row in own], [responses[row] for row in own]
            )
            for own in rows.values()
        ]
        return _merged(list(zip(rows.values(), [call.result() for call in calls], strict=True)), len(prompts))

    def _score(self, environment: Environment, prompts: Sequence[Prompt], responses: Sequence[Response]) -> EnvReport:
        with self._locks.get(id(environment), nullcontext()):
            return environment.score(prompts, responses)

    def answer_problems(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Return why the gold answer of each prompt cannot be read; None where it can."""
        problems: list[str | None] = []
        for prompt in prompts:
            environment = self.of(prompt.section)
            problems += environment.answer_problems([prompt]) if isinstance(environment, ChecksAnswers) else [None]
        return problems

    def shutdown(self) -> None:
        self._pool.shutdown()
        for environment in self._environments.values():
            environment.shutdown()


def _merged(reports: Sequence[tuple[Sequence[int], EnvReport]], count: int) -> EnvReport:
    """Return the reports of parts of the rows as one.

    Args:
        reports: rows, and the report of them.
    """
    rewards = [math.nan] * count
    names = dict.fromkeys(name for _, report in reports for name in report.components)
    components = {name: [math.nan] * count for name in names}
    columns: dict[str, list[object]] = {name: [None] * count for _, report in reports for name in report.columns}
    unscored = [""] * count
    for rows, report in reports:
        if report.columns.keys() != columns.keys():
            raise RewardError(
                f"columns of the environment: expected {sorted(columns)} from each, one gave {sorted(report.columns)}; "
                "let every env of data return the same ones"
            )
        for place, row in enumerate(rows):
            rewards[row] = report.rewards[place]
            for name, part in report.components.items():
                components[name][row] = part[place]
            for name, values in report.columns.items():
                columns[name][row] = values[place]
            if report.unscored:
                unscored[row] = report.unscored[place]
    return EnvReport(
        rewards=tuple(rewards),
        components={name: tuple(part) for name, part in components.items()},
        num_timeouts=sum(report.num_timeouts for _, report in reports),
        columns=columns,
        unscored=tuple(unscored) if any(report.unscored for _, report in reports) else (),
        metrics=merge_metrics(report.metrics for _, report in reports),
        printed=tuple(line for _, report in reports for line in report.printed),
    )


def build_rewards(
    sections: Mapping[str, EnvConfig], *, start_timeout_s: float, log_file: Path | None = None
) -> tuple[Environment, str]:
    """Return what scores the rows of a run, and the identities of the rewards.

    Args:
        sections: settings of environments by their dotted paths.
        log_file: gets what the reward of `env` prints; those of others have files beside it.

    Raises:
        ConfigError, RewardError: as of `build_environment`.
    """
    with ExitStack() as built:
        found: dict[str, Environment] = {}
        for path, section in sections.items():
            own = log_file if path == DEFAULT or log_file is None else log_file.with_stem(f"{log_file.stem}.{path}")
            found[path] = build_environment(section, start_timeout_s=start_timeout_s, log_file=own)
            built.callback(found[path].shutdown)
        built.pop_all()
    identities = {path: reward_identity(sections[path], environment) for path, environment in found.items()}
    if list(found) == [DEFAULT]:
        return found[DEFAULT], identities[DEFAULT]
    return SectionRewards(found), ";".join(f"{path}={identity}" for path, identity in identities.items())
