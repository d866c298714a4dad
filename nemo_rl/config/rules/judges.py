"""Rules of `env.judges`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nemo_rl.config.env import EnvConfig
from nemo_rl.config.judges import JudgeConfig
from nemo_rl.config.parts import JUDGE, JUDGES
from nemo_rl.config.rules.rule import would_be_ignored
from nemo_rl.config.schema import MasterConfig

__all__ = ["rule_judges_can_be_asked"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_OF_ENDPOINTS = (
    *("base_url", "api_key_env", "rubric", "scale", "shows_answer", "temperature", "json_schema", "timeout_s"),
    *("request_timeout_s", "retries", "max_concurrent", "max_requests_per_minute", "budget_tokens", "budget_cost"),
    "price_per_million_tokens",
)


def rule_judges_can_be_asked(config: MasterConfig) -> Iterator[str]:
    for path, env in config.envs.items():
        if env.name != JUDGE:
            continue
        if not env.judges:
            yield f"{path}.judges: expected at least one judge by a name of yours when {path}.name is {JUDGE!r}"
        for name, judge in env.judges.items():
            if not _NAME.fullmatch(name):
                yield f"{path}.judges: expected names of letters, digits, _ -, got {name!r}"
            yield from _judge_lines(judge, f"{path}.judges.{name}")
        yield from _component_lines(env, path)
        if config.experience.num_workers > 1:
            yield (
                f"experience.num_workers: limits and budgets of {path}.judges are those of the run, and each worker "
                "would have its own; set it to 1, and max_concurrent to what the judge serves"
            )


def _component_lines(env: EnvConfig, path: str) -> Iterator[str]:
    has_others = env.reward_function is not None
    for key, given in (("reward_weights", env.reward_weights), ("gates", env.gates)):
        if (unknown := sorted(given.keys() - env.judges.keys())) and not has_others:
            yield f"{path}.{key}.{unknown[0]}: no judge has this name; expected {', '.join(env.judges) or 'one'}"
    if env.reward_weights and (missing := sorted(env.judges.keys() - env.reward_weights.keys())):
        yield f"{path}.reward_weights: expected a weight of each component; {missing[0]} has none (0 draws its curve)"


def _judge_lines(judge: JudgeConfig, key: str) -> Iterator[str]:
    is_endpoint, is_classifier, low, high = judge.kind == "endpoint", judge.kind == "classifier", *judge.scale
    is_builtin = JUDGES.is_builtin(judge.kind)
    if is_builtin and judge.model is None:
        yield f"{key}.model: must be set for kind {judge.kind!r}"
    if is_endpoint and not re.match(r"https?://\S+", judge.base_url or ""):
        yield f"{key}.base_url: expected the URL of an endpoint, http://HOST:PORT/v1, got {judge.base_url!r}"
    if is_endpoint and re.search(r"[@?#]", judge.base_url or ""):
        yield (
            f"{key}.base_url: expected no password and no query, which config.yaml would hold; name the environment "
            "variable with the key in api_key_env"
        )
    if is_builtin and not is_classifier and not (judge.rubric or "").strip():
        yield f"{key}.rubric: expected what the judge is to look at, in words"
    if not is_endpoint and not is_classifier:
        because = f"{key}.kind is {judge.kind!r}, and an endpoint alone has them"
        names = ("base_url", "api_key_env", "json_schema")
        yield from would_be_ignored(judge, key, names, switch=f"{key}.kind", because=because)
    if is_builtin:
        because = f"{key}.kind is built in"
        yield from would_be_ignored(judge, key, ("options",), switch=f"{key}.kind", because=because)
    if is_classifier:
        because = "a classifier reads prompt and response alone"
        yield from would_be_ignored(judge, key, _OF_ENDPOINTS, switch=f"{key}.kind", because=because)
        if judge.mode != "pointwise":
            yield f"{key}.mode: a classifier scores one response, got {judge.mode!r}; set pointwise"
    if low >= high:
        yield f"{key}.scale: expected [lowest, highest], got [{low:g}, {high:g}]"
    if judge.mode == "pairwise":
        because = "a comparison has no scale"
        yield from would_be_ignored(judge, key, ("scale",), switch=f"{key}.mode", because=because)
    if judge.request_timeout_s > judge.timeout_s:
        most = f"at most timeout_s {judge.timeout_s:g}"
        yield f"{key}.request_timeout_s: expected {most}, got {judge.request_timeout_s:g}"
    if (judge.on_failure == "score") != (judge.failure_score is not None):
        yield (
            f"{key}.failure_score: expected a reward exactly where on_failure is score, got {judge.failure_score} "
            f"with on_failure {judge.on_failure}"
        )
    if judge.budget_cost is not None and judge.price_per_million_tokens == (0.0, 0.0):
        yield f"{key}.budget_cost: costs are unknown without price_per_million_tokens; set both, or budget_tokens"
