"""Rollouts from an engine that repeats its prompts: seeds, prompts and texts of each row, stale weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from nemo_rl.config.generation import GenerationConfig
from nemo_rl.data.datasets import Prompt
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.environments.interfaces import EnvReport, Response
from nemo_rl.errors import WorkerError
from nemo_rl.experience.rollouts import ResponseScorer, check_versions, row_seeds, sampling_params
from nemo_rl.models.generation.interfaces import GenerationInterface, GenerationOutput, GenerationRequest

STOP = 2
TOKENIZER = build_tokenizer(["0123456789"])
PROMPTS = [
    Prompt(index=i, text=text, answer=text, ids=tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"]))
    for i, text in enumerate(("12", "345"))
]
SEEDS = row_seeds(7, "group", 3, count=4)


class Echo(GenerationInterface):
    """Answers each prompt with itself and the stop token; a row of an even seed is cut off before that."""

    weight_version: int | tuple[int, ...] = 4

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        prompts = [prompt for prompt in request.prompt_ids for _ in range(request.group_size)]
        is_cut = [seed % 2 == 0 for seed in request.seeds]
        rows = [[*prompt, *([] if cut else [STOP])] for prompt, cut in zip(prompts, is_cut, strict=True)]
        flat = [token for row in rows for token in row]
        return GenerationOutput(
            token_ids=torch.tensor(flat, dtype=torch.int32),
            logprobs=torch.zeros(len(flat)),
            lengths=torch.tensor([len(row) for row in rows]),
            truncated=torch.tensor(is_cut),
            weight_version=self.weight_version,
        )

    def update_weights(self, weights: object, *, version: int) -> int:
        raise NotImplementedError

    def prepare_for_generation(self) -> None:
        """Always ready."""

    def finish_generation(self) -> None:
        """Nothing to free."""

    def shutdown(self) -> None:
        """Nothing to end."""


@dataclass
class Listener:
    """Remembers what it was given to score."""

    rows: list[tuple[Prompt, Response]] = field(default_factory=list)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> EnvReport:
        self.rows = list(zip(prompts, responses, strict=True))
        return EnvReport(rewards=tuple(float(row) for row in range(len(responses))))

    def shutdown(self) -> None:
        """Nothing to end."""


SAMPLING = sampling_params(GenerationConfig(), [STOP], is_validation=False)


def output_of(engine: Echo) -> GenerationOutput:
    request = GenerationRequest(prompt_ids=tuple(prompt.ids for prompt in PROMPTS), seeds=SEEDS, sampling=SAMPLING)
    return engine.generate(request)


def test_every_response_is_scored_with_its_own_prompt_and_without_its_stop_token() -> None:
    environment = Listener()
    output = output_of(Echo())
    _, report = ResponseScorer(environment, TOKENIZER, sampling=SAMPLING).score(PROMPTS, output)
    assert [(prompt.answer, response.text) for prompt, response in environment.rows] == [
        *(("12", "12"), ("12", "12")),
        *(("345", "345"), ("345", "345")),
    ]
    is_cut = [seed % 2 == 0 for seed in SEEDS]
    assert [response.truncated for _, response in environment.rows] == is_cut and len(set(is_cut)) == 2
    assert [response.num_tokens for _, response in environment.rows] == output.lengths.tolist()
    assert report.rewards == (0.0, 1.0, 2.0, 3.0)


@pytest.mark.parametrize("version", [3, 5])
def test_samples_of_other_weights_are_refused(version: int) -> None:
    with pytest.raises(WorkerError, match=f"expected samples of weight version {version}, the engines hold 4"):
        check_versions(output_of(Echo()), version)


def test_each_row_says_which_weights_it_was_sampled_from_when_any_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    check_versions(output_of(Echo()), None)
    monkeypatch.setattr(Echo, "weight_version", (4, 4, 5, 5))
    mixed = output_of(Echo())
    check_versions(mixed, None)
    assert mixed.row_versions == (4, 4, 5, 5)
    with pytest.raises(WorkerError, match="expected samples of weight version 4, the engines hold 5"):
        check_versions(mixed, 4)


def test_every_row_has_a_seed_of_its_own_that_run_purpose_and_ordinal_decide() -> None:
    sources = [(7, "group", 3), (8, "group", 3), (7, "validation", 3), (7, "group", 4)]
    seeds = [seed for source in sources for seed in row_seeds(*source, count=100)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert row_seeds(7, "group", 3, count=100) == tuple(seeds[:100]), "a resumed run samples the same"


def test_validation_has_a_temperature_of_its_own() -> None:
    config = GenerationConfig(temperature=0.8, val_temperature=0.0)
    for is_validation, expected in ((False, 0.8), (True, 0.0)):
        assert sampling_params(config, [STOP], is_validation=is_validation).temperature == expected
    assert sampling_params(GenerationConfig(temperature=0.8), [STOP], is_validation=True).temperature == 0.8
