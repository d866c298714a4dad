"""Settings of the models that are asked for scores (`env.judges`); see docs/judges.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.config.base import Options, Section, Text
from nemo_rl.config.parts import JUDGES

__all__ = ["JudgeConfig"]


class JudgeConfig(Section):
    """A model that gives each response a score; the reward is its place in `scale`, from 0 to 1."""

    kind: Annotated[str, JUDGES] = "endpoint"
    """`endpoint`: a chat model behind an OpenAI-compatible server, asked in words; `classifier`: a folder of
    transformers with a head for sequence classification (a reward model), which runs where rollouts are scored;
    `engine`: a chat model that the run starts itself, on the CPUs where rollouts are scored; or `module:Class` of your
    own that asks a model, see docs/extending.md."""
    model: Text | None = None
    """The name of the model at the endpoint, or the folder or hub name of a classifier or of the model of an engine,
    where `${policy.model_name}` is the policy's starting weights; a class of your own may do without."""
    options: Options = Field(default_factory=dict)
    """Settings of a class of your own."""
    base_url: str | None = None
    """The endpoint up to `/v1`, such as `http://127.0.0.1:8000/v1`."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable that holds the key of the endpoint; the key itself is never written."""
    mode: Literal["pointwise", "pairwise", "groupwise"] = "pointwise"
    """`pointwise`: one response per request; `pairwise`: two responses of a group, in both orders, and the reward is
    the share of won comparisons; `groupwise`: all responses of a group in one request, with a score for each."""
    rubric: str | None = None
    """The rubric tells the judge in words what to look at; an endpoint and an engine need one."""
    scale: tuple[FiniteFloat, FiniteFloat] = (0.0, 10.0)
    """Lowest and highest score; a number outside is no verdict. `pairwise` has none."""
    shows_answer: bool = False
    """Show the gold answer of the row to the judge, as a reference."""
    hides_thoughts: bool = True
    """Show what follows `</think>` alone, where a response has it."""
    max_response_chars: PositiveInt = 20_000
    """Most characters of a response that a judge is shown; a longer one is a failure, never cut."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge; a further try has another seed, and at least 0.5."""
    max_tokens: PositiveInt = 512
    """Most tokens of a verdict; one that is cut there cannot be read. For a classifier: of prompt and response."""
    json_schema: bool = True
    """Ask the endpoint to follow the schema of verdicts (`response_format`); false for a server that does not know
    it. Verdicts are read by the same schema either way."""
    timeout_s: PositiveFloat = 120.0
    """Seconds for the verdict of a row, over all tries."""
    request_timeout_s: PositiveFloat = 60.0
    """Seconds of one try."""
    retries: NonNegativeInt = 3
    """Further tries after a failed request or a verdict that cannot be read. Waiting for a rate limit is none."""
    max_concurrent: PositiveInt = 8
    """Most requests at one time; an engine works on one of them."""
    max_requests_per_minute: PositiveInt | None = None
    """Most requests in a minute, evenly spaced; null: no limit but that of the server (429), which is waited for."""
    budget_tokens: PositiveInt | None = None
    """Most tokens of requests and verdicts in the run folder; behind it no request is made. null: no limit."""
    budget_cost: PositiveFloat | None = None
    """Most money, in the currency of the prices; null: no limit."""
    price_per_million_tokens: tuple[NonNegativeFloat, NonNegativeFloat] = (0.0, 0.0)
    """Price of a million tokens that are read, and of a million that are written."""
    on_failure: Literal["leave_out", "score", "error"] = "leave_out"
    """A row without a verdict: it is in no statistic and not trained, it gets `failure_score`, or the run ends."""
    failure_score: FiniteFloat | None = None
    """The reward of a row without a verdict where `on_failure` is `score`, from 0 to 1."""
    max_failed_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The run ends when more than this share of the last 64 rows has no verdict."""
    verdicts: str | None = None
    """A file of verdicts of another run, which are taken before the judge is asked: so a run is repeated. null: those
    of the run's own folder alone."""
