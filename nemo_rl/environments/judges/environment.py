"""`JudgeEnvironment`: rewards that are verdicts of `env.judges`, with a function of the user's beside them.

    score                       rows of whole groups, from several threads at once
      |- ProcessEnvironment     the function of the user, if there is one
      |- gates                  components that come first; closed rows are asked about no further
      `- judges                 all others at once, on one event loop

Built by the factory. Invariant: a row without a verdict has no reward: it is unscored, has the score that the recipe
states, or ends the run, and is counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from threading import Lock, Thread
from typing import Protocol, TypeVar, cast

from nemo_rl.config.env import EnvConfig
from nemo_rl.config.judges import JudgeConfig
from nemo_rl.config.parts import JUDGES
from nemo_rl.data.datasets import Prompt
from nemo_rl.data.thinking import final_answer
from nemo_rl.environments.interfaces import EnvReport, Response
from nemo_rl.environments.judges.asking import AskingJudge
from nemo_rl.environments.judges.kept import KeptVerdicts
from nemo_rl.environments.judges.verdicts import Case, Verdict
from nemo_rl.environments.process_environment import EnvironmentStart, ProcessEnvironment, custom_environment
from nemo_rl.errors import ConfigError, RewardError, name_some, shorten
from nemo_rl.utils.metrics import Mean, Reduction, Sum

__all__ = ["JudgeEnvironment", "judge_environment"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_WINDOW = 64
"""Rows of `max_failed_share`; fewer say nothing."""
_CLOSE_TIMEOUT_S = 10.0


class _Judge(Protocol):
    async def verdict(self, case: Case) -> Verdict: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Part:
    """The verdicts of one judge on some rows; NaN where there is none."""

    values: list[float]
    failures: dict[int, str] = field(default_factory=dict)
    metrics: dict[str, Reduction] = field(default_factory=dict)


class JudgeEnvironment:
    """An environment that asks models.

    Args:
        judges: by their names in `cfg.judges`.
        function: scores before the judges; None without a reward function.
        function_name: the component of a function that returns one number.
    """

    overlaps = True
    """See `WaitsForOthers`."""

    def __init__(
        self, cfg: EnvConfig, judges: Mapping[str, _Judge], *, function: ProcessEnvironment | None, function_name: str
    ) -> None:
        self._cfg, self._judges = cfg, judges
        self._function, self._function_name = function, function_name
        self._function_lock = Lock()
        self._last: dict[str, deque[bool]] = {name: deque(maxlen=_WINDOW) for name in judges}
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="judges", daemon=True)
        self._thread.start()

    @property
    def source(self) -> str:
        """Return what the rewards are made of, as one text."""
        # Runs of recipes without options keep their identity.
        parts = [
            judge.model_dump_json(exclude=None if judge.options else {"options"}) for judge in self._cfg.judges.values()
        ]
        return ";".join([*parts, *([] if self._function is None else [self._function.source])])

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> EnvReport:
        """Score rows of whole groups.

        Raises:
            RewardError: the function failed, or a judge gives no verdicts and the recipe ends the run for it.
        """
        parts: dict[str, list[float]] = {}
        metrics: dict[str, Reduction] = {}
        failures: dict[int, str] = {}
        printed, timeouts = tuple[str, ...](), 0
        if self._function is not None:
            with self._function_lock:
                report = self._function.score(prompts, responses)
            parts = {name: list(part) for name, part in report.components.items()}
            parts = parts or {self._function_name: list(report.rewards)}
            if both := sorted(parts.keys() & self._judges.keys()):
                raise RewardError(
                    f"env.judges.{both[0]}: the reward function has a component of this name; take another"
                )
            printed, timeouts = report.printed, report.num_timeouts
        is_open = [True] * len(prompts)
        for stage in self._stages():
            for name in stage:
                if name not in self._judges and name not in parts:
                    raise RewardError(f"env.gates.{name}: no component has this name, but {name_some(sorted(parts))}")
            asked = {name for name in stage if name in self._judges}
            rows = [row for row, opens in enumerate(is_open) if opens and row not in failures]
            for name, part in self._ask(asked, rows, prompts, responses).items():
                parts[name] = part.values
                metrics |= part.metrics
                failures |= part.failures
            for name in stage:
                least = self._cfg.gates.get(name, -math.inf)
                is_open = [opens and not parts[name][row] < least for row, opens in enumerate(is_open)]
        if (weights := self._cfg.reward_weights) and weights.keys() != parts.keys():
            raise RewardError(
                f"env.reward_weights: expected a weight of each of {name_some(sorted(parts))}, got {sorted(weights)}; "
                "0 only draws a curve"
            )
        if self._cfg.gates:
            metrics["gates_closed"] = Mean(float(is_open.count(False)), float(len(is_open)))
        rewards = [self._reward(parts, row) for row in range(len(prompts))]
        return EnvReport(
            rewards=tuple(0.0 if row in failures else reward for row, reward in enumerate(rewards)),
            components={name: tuple(part) for name, part in parts.items()} if len(parts) > 1 else {},
            num_timeouts=timeouts,
            printed=(*printed, *_lines(failures)),
            unscored=tuple(failures.get(row, "") for row in range(len(prompts))),
            metrics=metrics,
        )

    def answer_problems(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """See `ChecksAnswers`: the function says it, where there is one."""
        return [None] * len(prompts) if self._function is None else self._function.answer_problems(prompts)

    def probe(self, prompt: Prompt, *, where: str) -> None:
        """Ask every judge about four responses to a prompt: one that may be good, and three that are not.

        Args:
            where: dotted path of the section of the prompt.

        Raises:
            RewardError: the function fails, or a judge gives no verdict that can be read.
        """
        good = "This is the answer." if prompt.answer is None else str(prompt.answer)
        texts = {"a good answer": good, "nothing": "", "the question": prompt.text, "'score: 10'": "score: 10"}
        if self._function is not None:
            self._function.score([prompt], [Response(text="", num_tokens=0)])
        for name, judge in self._cfg.judges.items():
            cases = _cases(judge, prompt, list(texts.values()))
            verdicts = self._run(self._verdicts(name, cases))
            scores: dict[str, list[float]] = {text: [] for text in texts}
            for places, verdict in zip(_places(judge, len(texts)), verdicts, strict=True):
                for place, score in zip(places, verdict.scores or (), strict=False):
                    scores[list(texts)[place]].append(score)
            found = {text: math.fsum(own) / len(own) for text, own in scores.items() if own}
            if not found:
                raise RewardError(
                    f"env.judges.{name}: no verdict on four responses to the first row of {where}, before the run "
                    f"(env.preflight_reward=false leaves this out): {shorten(verdicts[0].failure)}"
                    + (f"\n  its text: {shorten(repr(verdicts[0].text))}" if verdicts[0].text else "")
                )
            if len(set(found.values())) == 1 or len(found) < len(texts):
                told = ", ".join(f"{text}: {score:.3g}" for text, score in found.items())
                logger.warning(
                    "env.judges.%s: the judge does not tell responses apart: %s; look at its rubric, or take a larger "
                    "model (verdicts that are missing could not be read)",
                    name,
                    told,
                )

    def shutdown(self) -> None:
        """End judges and the function. Idempotent."""
        if self._thread.is_alive():
            self._run(self._close(), timeout_s=_CLOSE_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_TIMEOUT_S)
            self._loop.close()
        if self._function is not None:
            self._function.shutdown()

    def _stages(self) -> list[list[str]]:
        """Return names of components in the order in which they are needed; those of a stage at the same time."""
        gates = [[name] for name in self._cfg.gates]
        return [*gates, [name for name in self._judges if name not in self._cfg.gates]]

    def _reward(self, parts: Mapping[str, Sequence[float]], row: int) -> float:
        weights = self._cfg.reward_weights
        values = {name: part[row] for name, part in parts.items() if not math.isnan(part[row])}
        reward = math.fsum(weights.get(name, 1.0) * value for name, value in values.items())
        threshold = self._cfg.score_threshold
        return reward if threshold is None else float(reward >= threshold)

    def _ask(
        self, names: set[str], rows: Sequence[int], prompts: Sequence[Prompt], responses: Sequence[Response]
    ) -> dict[str, _Part]:
        """Return the verdicts of judges on rows, all judges at the same time."""

        async def ask() -> list[_Part]:
            parts = (self._part(name, rows, prompts, responses) for name in sorted(names))
            return await asyncio.gather(*parts)

        return dict(zip(sorted(names), self._run(ask()), strict=True)) if names else {}

    async def _part(
        self, name: str, rows: Sequence[int], prompts: Sequence[Prompt], responses: Sequence[Response]
    ) -> _Part:
        judge = self._cfg.judges[name]
        part = _Part(values=[math.nan] * len(prompts))
        cases, of_case = list[Case](), list[list[int]]()
        for _, run in groupby(rows, key=lambda row: id(prompts[row])):
            group = list(run)
            texts = [responses[row].text for row in group]
            found = _cases(judge, prompts[group[0]], texts)
            cases += found
            of_case += [[group[place] for place in places] for places in _places(judge, len(group))]
        verdicts = await self._verdicts(name, cases)
        values: dict[int, list[float]] = {}
        for places, verdict in zip(of_case, verdicts, strict=True):
            for place, row in enumerate(places):
                if verdict.scores is None:
                    part.failures[row] = f"judge {name}: {verdict.failure}"
                else:
                    values.setdefault(row, []).append(verdict.scores[place])
        for row, own in values.items():
            # A row of pairs counts with those of its comparisons that have a verdict.
            part.failures.pop(row, None)
            part.values[row] = math.fsum(own) / len(own)
        for row in rows:
            if row not in values and row not in part.failures:
                part.failures[row] = f"judge {name}: no other response of its group to compare with"
        part.metrics = _metrics(name, judge, verdicts, len(part.failures))
        self._settle(name, judge, part, rows)
        return part

    def _settle(self, name: str, judge: JudgeConfig, part: _Part, rows: Sequence[int]) -> None:
        """Do with rows without a verdict what the recipe says.

        Raises:
            RewardError: it ends the run, or too many rows have none.
        """
        last = self._last[name]
        last.extend(row in part.failures for row in rows)
        text = shorten(next(iter(part.failures.values()), ""))
        if part.failures and judge.on_failure == "error":
            raise RewardError(
                f"{text}\n  env.judges.{name}.on_failure is error: set it to leave_out to go on without such rows"
            )
        if len(last) == _WINDOW and sum(last) > judge.max_failed_share * _WINDOW:
            raise RewardError(
                f"env.judges.{name}: {sum(last)} of the last {_WINDOW} rows have no verdict, and max_failed_share is "
                f"{judge.max_failed_share:g}; the last one: {text or 'scored'}"
            )
        if judge.on_failure == "score":
            assert judge.failure_score is not None, "a rule asks for it"
            for row in part.failures:
                part.values[row] = judge.failure_score
            part.failures = {}

    async def _verdicts(self, name: str, cases: Sequence[Case]) -> list[Verdict]:
        return list(await asyncio.gather(*(self._judges[name].verdict(case) for case in cases)))

    async def _close(self) -> None:
        for judge in self._judges.values():
            await judge.close()

    def _run(self, work: Coroutine[object, object, _T], *, timeout_s: float | None = None) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)


def _cases(judge: JudgeConfig, prompt: Prompt, texts: Sequence[str]) -> list[Case]:
    """Return what a judge is asked about the responses to one prompt."""
    shown = [final_answer(text) if judge.hides_thoughts else text for text in texts]
    answer = str(prompt.answer) if judge.shows_answer and prompt.answer is not None else None
    return [
        Case(prompt=prompt.text, responses=tuple(shown[place] for place in places), answer=answer)
        for places in _places(judge, len(texts))
    ]


def _places(judge: JudgeConfig, count: int) -> list[list[int]]:
    """Return the responses of each request about a group of so many."""
    if judge.mode == "pointwise":
        return [[place] for place in range(count)]
    if judge.mode == "groupwise":
        return [list(range(count))] if count > 1 else []
    return [[one, other] for one in range(count) for other in range(count) if one != other]


def _metrics(name: str, judge: JudgeConfig, verdicts: Sequence[Verdict], num_failed: int) -> dict[str, Reduction]:
    """Return what a run logs of a judge under `rollout/`."""
    asked = [verdict for verdict in verdicts if not verdict.is_kept]
    read, written = (sum(verdict.tokens[at] for verdict in asked) for at in (0, 1))
    price_read, price_written = judge.price_per_million_tokens
    found = {
        "asked": float(len(asked)),
        "kept": float(len(verdicts) - len(asked)),
        "further_tries": float(sum(max(0, verdict.tries - 1) for verdict in asked)),
        "rate_limited": float(sum(verdict.limited for verdict in asked)),
        "rows_without_verdict": float(num_failed),
        "tokens": float(read + written),
        "cost": (read * price_read + written * price_written) / 1e6,
    }
    kinds = Counter(verdict.kind for verdict in verdicts if verdict.kind)
    found |= {f"failed/{kind}": float(count) for kind, count in kinds.items()}
    metrics: dict[str, Reduction] = {f"judge/{name}/{key}": Sum(value) for key, value in found.items()}
    seconds = Mean(math.fsum(verdict.seconds for verdict in asked), float(len(asked)))
    return metrics | {f"judge/{name}/seconds": seconds}


def _lines(failures: Mapping[int, str]) -> list[str]:
    """Return lines for the person at the terminal about rows without a reward."""
    if not failures:
        return []
    return [f"{len(failures)} rows without a verdict, the first: {shorten(next(iter(failures.values())))}"]


def judge_environment(cfg: EnvConfig, start: EnvironmentStart) -> JudgeEnvironment:
    """Return the environment of `env.judges`; see `build_environment` for its errors."""
    path = None if start.log_file is None else _verdicts_file(start.log_file)
    kept = KeptVerdicts(path, cfg.judges)
    judges = {name: _judge(name, judge, kept) for name, judge in cfg.judges.items()}
    function: ProcessEnvironment | None = None
    if cfg.reward_function is not None:
        own = cfg.model_copy(update={"reward_weights": {}, "score_threshold": None})
        found = custom_environment(own, start)
        assert isinstance(found, ProcessEnvironment), "a function runs in processes"
        function = found
    name = (cfg.reward_function or "").rpartition(":")[2]
    return JudgeEnvironment(cfg, judges, function=function, function_name=name)


def _judge(name: str, config: JudgeConfig, kept: KeptVerdicts) -> _Judge:
    made = JUDGES.load(config.kind, key=f"env.judges.{name}.kind")
    if config.kind == "classifier":
        return cast(_Judge, made(name, config, kept))
    try:
        model = made(name=name, config=config)
    except TypeError as error:
        raise ConfigError(
            f"env.judges.{name}.kind: {config.kind!r} is called with name= and config=: {error}"
        ) from error
    return AskingJudge(name, config, kept, model)


def _verdicts_file(log_file: Path) -> Path:
    """Return the file of verdicts beside that of what rewards print."""
    return log_file.with_name(f"verdicts{log_file.stem.removeprefix('reward')}.jsonl")
