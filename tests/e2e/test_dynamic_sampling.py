"""Runs with dynamic sampling: whole groups that differ, what is carried and cleared, resume, its cap and its keys."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from nemo_rl.algorithms.batches import DROPPED
from nemo_rl.algorithms.grpo_sync import GRPOTrainer
from nemo_rl.algorithms.preflight.checks import preflight
from nemo_rl.algorithms.setup import open_trainer
from nemo_rl.algorithms.stages.bodies import Train
from nemo_rl.algorithms.stages.stage import StepState
from nemo_rl.errors import CheckpointError, DatasetError, UserError, WorkerError
from nemo_rl.experience.rollout_records import GroupRequest
from tests.helpers.runs import LOCAL, load_recipe, logged_steps, write_recipe

PROMPTS, GROUP = 4, 4
GRPO = {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": GROUP, "use_dynamic_sampling": True}
WHOLE = {"batch_multiplier": 1.5, "seed": 4}
"""With this seed the checkpoint after step 2 gives groups back."""
RIGHT_OR_WRONG = {"name": "custom", "reward_function": "tests.helpers.rewards:odd_share", "score_threshold": 0.6}


class Watched:
    """A run, its steps, and what was alive after each."""

    def __init__(self, folder: Path, model: Path, *, resume: bool = False, **grpo: object) -> None:
        saving = {"enabled": True, "save_period": 2, "keep_top_k": None}
        recipe = write_recipe(
            folder, model, grpo={**GRPO, "max_num_steps": 4, **grpo}, env=RIGHT_OR_WRONG, checkpointing=saving
        )
        overrides = {**LOCAL, **({"checkpointing.resume": "true"} if resume else {})}
        self.log_dir = folder / "logs"
        self.config = load_recipe(recipe, overrides)
        self.steps: list[StepState] = []
        self.alive: list[int] = []
        self.dropped: list[str] = []
        self.drawn: list[tuple[int, list[int]]] = []
        """Step and seeds of the groups of each round."""

    def run(self) -> Watched:
        with open_trainer(self.config, console=Console(file=io.StringIO())) as trainer:
            self._watch(trainer)
            trainer.fit()
            self.alive.append(trainer.data_plane_stats()["live_rows"])  # type: ignore[arg-type]
        return self

    def _watch(self, trainer: GRPOTrainer) -> None:
        step, clear = trainer.step, trainer._parts.client.kv_clear

        def watched_step() -> StepState:
            done = step()
            self.steps.append(done)
            self.alive.append(trainer.data_plane_stats()["live_rows"])  # type: ignore[arg-type]
            return done

        def watched_clear(keys: object, partition: str, *, reason: str = "") -> None:
            if reason == DROPPED:
                self.dropped += keys  # type: ignore[arg-type]
            clear(keys, partition, reason=reason)

        rollout = trainer._parts.rollout
        submit = rollout.submit_groups

        def watched_submit(groups: Sequence[GroupRequest], **how: object) -> object:
            self.drawn.append((len(self.steps) + 1, [group.seed for group in groups]))
            return submit(groups, **how)  # type: ignore[arg-type]

        rollout.submit_groups = watched_submit  # type: ignore[method-assign, assignment]
        trainer.step = watched_step  # type: ignore[method-assign]
        trainer._parts.client.kv_clear = watched_clear  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Watched:
    return Watched(tmp_path_factory.mktemp("whole"), model, **WHOLE).run()


def test_every_step_trains_whole_groups_whose_rewards_differ(whole: Watched) -> None:
    assert len(whole.steps) == 4
    for step in whole.steps:
        rewards = step.rows.sample_stats.rewards.reshape(PROMPTS, GROUP)
        assert all(len(set(group)) > 1 for group in rewards.tolist())
        uids = step.rows.group_uids
        assert [uids[row : row + GROUP] for row in range(0, len(uids), GROUP)] == [
            (uid,) * GROUP for uid in dict.fromkeys(uids)
        ]
        assert step.chosen is not None and len(step.chosen.meta) == PROMPTS * GROUP
    trained = [key for step in whole.steps for key in step.rows.meta.keys]
    assert len(set(trained)) == len(trained), "no row is trained twice"
    assert whole.dropped and not set(whole.dropped) & set(trained)


def test_what_is_beyond_a_step_is_trained_in_the_next_and_nothing_else_stays(whole: Watched) -> None:
    rows = logged_steps(whole.log_dir)
    carried = [int(row["rollout/carried_rows"]) for row in rows]
    assert whole.alive == [*carried, 0] and any(carried)
    assert [int(row["data_plane/live_rows"]) for row in rows] == carried
    for before, row, step in zip([0, *carried], rows, whole.steps, strict=False):
        # A checkpoint comes after every second step: nothing is carried over it.
        expected = min(before, PROMPTS * GROUP) if step.number % 2 == 0 else 0
        lags = step.policy_version - step.rows.weight_versions
        assert int((lags == 1).sum()) == expected and int((lags > 1).sum()) == 0
        assert row["rollout/sampling_rounds"] >= 1 and 0 < row["rollout/informative_share"] <= 1
    with_dropped = [row for row in rows if row["rollout/informative_share"] < 1]
    assert with_dropped and any(row["rollout/sampled_reward"] != row["train/reward"] for row in with_dropped)


def test_prompts_of_groups_that_a_checkpoint_gave_back_are_drawn_before_others(whole: Watched) -> None:
    """A group that is drawn again keeps its ordinal, and so its seed; no other group has it."""
    num_given_back = int(logged_steps(whole.log_dir)[1]["rollout/carried_rows"]) // GROUP
    before = [seed for step, seeds in whole.drawn if step <= 2 for seed in seeds]
    after = [seed for step, seeds in whole.drawn if step > 2 for seed in seeds]
    assert num_given_back > 0 and len(set(before)) == len(before)
    assert set(after[:num_given_back]) <= set(before)
    assert not set(after[num_given_back:]) & set(before), "drawn twice"


def test_a_resumed_run_samples_and_trains_as_one_that_was_left_alone(
    whole: Watched, model: Path, tmp_path: Path
) -> None:
    Watched(tmp_path, model, **WHOLE, max_num_steps=2).run()
    resumed = Watched(tmp_path, model, resume=True, **WHOLE).run()
    names = ("train/loss", "train/grad_norm", "train/reward", "rollout/sampled_reward", "rollout/carried_rows")
    left_alone = logged_steps(whole.log_dir)
    assert [step.number for step in resumed.steps] == [3, 4]
    for row, expected in zip(logged_steps(resumed.log_dir)[2:], left_alone[2:], strict=True):
        assert {name: row[name] for name in names} == {name: expected[name] for name in names}


def test_a_larger_round_carries_more(whole: Watched, model: Path, tmp_path: Path) -> None:
    larger = Watched(tmp_path, model, batch_multiplier=4.0, max_num_steps=1).run()
    [row] = logged_steps(larger.log_dir)
    assert row["rollout/sampling_rounds"] == 1 < logged_steps(whole.log_dir)[0]["rollout/sampling_rounds"]
    assert row["rollout/carried_rows"] > 0


def test_too_few_groups_that_differ_end_the_run_and_say_why(model: Path, tmp_path: Path) -> None:
    run = Watched(tmp_path, model, dynamic_sampling_max_gen_batches=2)
    run.config = run.config.model_copy(update={"env": run.config.env.model_copy(update={"score_threshold": 1e-9})})
    with open_trainer(run.config, console=Console(file=io.StringIO())) as trainer:
        said = r"after 2 rounds of 4 prompts step 1 has \d of 4 groups .* too easy or too hard"
        with pytest.raises(UserError, match=said):
            trainer.fit()
        assert trainer.data_plane_stats()["live_rows"] == 0


def test_a_step_that_fails_leaves_no_row_not_even_a_carried_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(tmp_path, model, batch_multiplier=4.0)
    with open_trainer(run.config, console=Console(file=io.StringIO())) as trainer:

        def fail(stage: Train, step: StepState) -> object:
            assert (
                trainer._parts.source.num_waiting_rows > 0 and trainer.data_plane_stats()["live_rows"] > PROMPTS * GROUP
            )
            raise WorkerError("planted", stage="train")

        monkeypatch.setattr(Train, "_submit", fail)
        with pytest.raises(WorkerError, match="planted"):
            trainer.fit()
        assert trainer.data_plane_stats()["live_rows"] == 0


def test_a_group_samples_by_its_seed_alone(model: Path, tmp_path: Path) -> None:
    """The same prompt with another seed draws other random numbers; with the same one the same, wherever it stands."""
    run = Watched(tmp_path, model)
    with open_trainer(run.config, console=Console(file=io.StringIO())) as trainer:
        trainer.open_run()
        sampled, client = [], trainer._parts.client
        for number, seeds in enumerate(((0, 64), (64, 0), (64, 64))):
            groups = [GroupRequest(uid=f"u{number}{at}", prompt=0, seed=seed) for at, seed in enumerate(seeds)]
            rollout, where = trainer._parts.rollout, {"version": 0, "partition_id": "train"}
            together = number < 2
            each_alone = [] if together else [rollout.submit_group(group, **where) for group in groups]
            pending = rollout.submit_groups(groups, **where) if together else each_alone
            assert all(each.is_ready for each in pending)
            keys = [each.result().meta.keys for each in pending]
            assert [each[0] for each in keys] == [f"{group.uid}_g0" for group in groups]
            logprobs = [client.kv_batch_get(each, "train", ["generation_logprobs"]) for each in keys]
            sampled.append([[row.tolist() for row in each["generation_logprobs"].unbind()] for each in logprobs])
            client.kv_clear([key for each in keys for key in each], "train", reason="test")
    first, swapped, same = sampled
    assert first[0] != first[1] and swapped == first[::-1] and same[0] == same[1] == first[1]


def test_prompts_requeued_by_a_run_with_other_seeds_are_refused(model: Path, tmp_path: Path) -> None:
    run = Watched(tmp_path, model)
    with open_trainer(run.config, console=Console(file=io.StringIO())) as trainer:
        source = trainer._parts.source
        state = source.state_dict()
        source.load_state_dict({**state, "dynamic_sampling": {"redrawn_prompts": []}}, step=2, folder=tmp_path)
        with pytest.raises(CheckpointError, match="written when seeds of rows came from the step"):
            source.load_state_dict({**state, "dynamic_sampling": {"redrawn_prompts": [3]}}, step=2, folder=tmp_path)


@pytest.mark.parametrize(
    ("period", "multiplier"),
    [(2, 3.0), *(pytest.param(3, multiplier, marks=pytest.mark.full) for multiplier in (2.0, 4.0)), (3, 10.0)],
)
def test_the_last_epoch_ends_when_prompts_and_carried_groups_are_too_few_for_a_round(
    model: Path, tmp_path: Path, period: int, multiplier: float
) -> None:
    """Whether a checkpoint gives groups back or not; the last step validates and is saved."""
    run = Watched(tmp_path, model, batch_multiplier=multiplier, max_num_epochs=1, max_num_steps=99)
    saving = run.config.checkpointing.model_copy(update={"save_period": period})
    grpo = run.config.grpo.model_copy(update={"val_at_end": True})
    data = run.config.data.model_copy(update={"validation": run.config.data.train})
    run.config = run.config.model_copy(update={"checkpointing": saving, "grpo": grpo, "data": data})
    run.run()
    rows = logged_steps(run.log_dir)
    new = len({seed for _, seeds in run.drawn for seed in seeds})
    num_carried = int(rows[-1]["rollout/carried_rows"]) // GROUP
    assert len(rows) > 2 and 64 - new + num_carried < run.config.grpo.prompts_per_round and run.alive[-1] == 0
    assert "val/reward" in rows[-1], "known before a checkpoint gives groups back"


def test_the_last_round_of_an_epoch_may_have_no_group_that_differs(model: Path, tmp_path: Path) -> None:
    run = Watched(tmp_path, model, max_num_epochs=1, max_num_steps=99, dynamic_sampling_max_gen_batches=99)
    constant = {"reward_function": "tests.helpers.rewards:indifferent", "score_threshold": None}
    run.config = run.config.model_copy(update={"env": run.config.env.model_copy(update=constant)})
    run.run()
    assert len(run.drawn) == 16 and run.alive == [0, 0]
    assert [step.chosen for step in run.steps] == [None], "no update"


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gdpo"])
def test_estimators_over_the_whole_step_see_groups_that_differ_alone(name: str, model: Path, tmp_path: Path) -> None:
    run = Watched(tmp_path, model, adv_estimator={"name": name}, max_num_steps=1)
    if name == "gdpo":
        judged = {"reward_function": "tests.helpers.rewards:right_and_short", "score_threshold": None}
        run.config = run.config.model_copy(update={"env": run.config.env.model_copy(update=judged)})
    run.run()
    [step] = run.steps
    assert run.dropped and step.chosen is not None
    advantages, sample_stats = step.chosen.advantages.double(), step.rows.sample_stats
    weights = np.ones(len(sample_stats)) if name == "gdpo" else sample_stats.response_lengths
    assert float(np.average(advantages, weights=weights)) == pytest.approx(0, abs=1e-6)
    differs = [sample_stats.rewards, *sample_stats.components.values()]
    groups = [any(len(set(part[row : row + GROUP].tolist())) > 1 for part in differs) for row in range(0, 16, GROUP)]
    assert len(advantages) == PROMPTS * GROUP and all(groups)
    if name == "gdpo":
        sums = sample_stats.rewards.reshape(PROMPTS, GROUP)
        assert any(len(set(group)) == 1 for group in sums.tolist()), "components that cancel in the sum"


def test_a_round_that_is_larger_than_the_data_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    run = Watched(tmp_path, model, batch_multiplier=17.0)
    said = r"num_prompts_per_step=4 x grpo.batch_multiplier 17 = 68 prompts, got 64; .* lower batch_multiplier"
    with pytest.raises(UserError, match=said) as refused:
        preflight(run.config)
    assert not isinstance(refused.value, DatasetError) and not run.log_dir.exists()
    with pytest.raises(UserError, match=said):
        run.run()
    preflight(Watched(tmp_path / "fits", model, batch_multiplier=16.0).config)


def test_the_last_epoch_ends_with_the_groups_that_are_left(model: Path, tmp_path: Path) -> None:
    """64 prompts, rounds of 24: two of them, and a third where a checkpoint has given enough prompts back."""
    run = Watched(tmp_path, model, batch_multiplier=6.0, max_num_epochs=1, max_num_steps=99).run()
    assert 1 < len(run.steps) < 99 and run.alive[-1] == 0
    assert 2 <= sum(row["rollout/sampling_rounds"] for row in logged_steps(run.log_dir)) <= 3
