"""The rates of both sides of an asynchronous run, and the number of engines that balances them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from nemo_rl.cli.main import app
from nemo_rl_tools.plan import RunPlan
from nemo_rl_tools.plan.command import plan_recipe
from tests.repo.walk_docs import ROOT

MATH, DEMO = ROOT / "configs" / "recipes" / "grpo_math_1b.yaml", ROOT / "configs" / "grpo_sort_cpu.yaml"
ASYNC = ("grpo.async.enabled=true", "grpo.use_generation_logprobs_as_prev=true", "cluster.gpus_per_node=4")


def apart(engines: int) -> tuple[str, ...]:
    place = "policy.generation.colocated"
    return (f"{place}.enabled=false", f"{place}.gpus_per_node={engines}", f"policy.generation.num_replicas={engines}")


def planned(*overrides: str, gpu: str | None = "H100-80G") -> RunPlan:
    plan, error = plan_recipe(MATH if gpu else DEMO, overrides=overrides, gpu=gpu, nodes=None)
    assert error is None, error
    return plan


def seconds(plan: RunPlan) -> dict[str, float]:
    return {bound.stage: bound.seconds for bound in plan.bounds}


@pytest.mark.parametrize("engines", [1, 4, 16])
def test_the_sides_are_the_stages_of_the_plan_and_a_step_waits_for_the_slower_one(engines: int) -> None:
    plan = planned(*ASYNC, *apart(engines))
    balance, stages = plan.balance, seconds(plan)
    assert balance is not None and balance.engines == engines
    training = stages["reference_logprobs"] + stages["train"] + stages["data plane"]
    assert (balance.generation_s, balance.training_s) == (stages["rollout"], pytest.approx(training))
    assert balance.step_s == pytest.approx(max(stages["rollout"], training) + stages["refit"])
    assert balance.binding == ("engines" if stages["rollout"] > training else "trainer")
    shorter, longer = sorted([stages["rollout"], training])
    assert balance.idle_share == pytest.approx((longer - shorter) / longer)
    # 512 rows of 1,024 new tokens, in rows of 1,536.
    assert balance.engine_tokens_s * engines * balance.generation_s == pytest.approx(512 * 1024)
    assert balance.training_tokens_s * training == pytest.approx(512 * 1536)


def test_the_balanced_number_is_the_smallest_that_keeps_up() -> None:
    first = planned(*ASYNC, *apart(1)).balance
    assert first is not None and first.balanced_engines is not None and first.balanced_engines > 1
    count = first.balanced_engines
    enough, fewer = planned(*ASYNC, *apart(count)).balance, planned(*ASYNC, *apart(count - 1)).balance
    assert enough is not None and fewer is not None
    assert enough.generation_s <= enough.training_s and enough.advice.startswith(f"{count} engines keep up")
    assert fewer.generation_s > fewer.training_s
    assert fewer.advice.startswith(f"{count} engines would keep up with the trainer, got {count - 1}")


def test_more_steps_ahead_fill_the_engines_and_shorten_what_no_engine_can() -> None:
    """A row needs its turns; with the rows of more steps each turn serves more of them."""
    small = ("grpo.num_prompts_per_step=4", "policy.train_global_batch_size=64", "grpo.async.max_staleness=15")
    one = planned(*ASYNC, *apart(4), *small).balance
    many = planned(*ASYNC, *apart(4), *small, "grpo.async.lookahead=15").balance
    assert one is not None and many is not None
    assert one.balanced_engines is None and "raise grpo.async.lookahead" in one.advice
    assert many.least_generation_s < one.least_generation_s / 4 and many.training_s == one.training_s


def test_engines_and_data_plane_hold_the_rows_of_all_steps_ahead() -> None:
    given = (*ASYNC, *apart(4), "policy.generation.max_batch_size=1024")
    in_turns = planned(*given, "grpo.async.max_staleness=0")
    ahead = planned(*given, "grpo.async.max_staleness=3", "grpo.async.lookahead=1")
    assert (ahead.plane.rows, in_turns.plane.rows) == (1024, 512)
    assert (ahead.engine.rows, in_turns.engine.rows) == (256, 128)
    assert ahead.engine.cache == 2 * in_turns.engine.cache


def test_runs_in_turns_and_runs_on_cpus_have_no_balance() -> None:
    assert planned().balance is None
    assert planned(*ASYNC, *apart(4), "grpo.async.max_staleness=0").balance is None
    assert planned("grpo.async.enabled=true", gpu=None).balance is None


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_shows_both_sides(as_json: bool) -> None:
    command = ["plan", str(MATH), "--gpu", "H100-80G", *ASYNC, *apart(1), *(["--json"] if as_json else [])]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    if as_json:
        balance = json.loads(done.stdout)["balance"]
        assert balance["binding"] == "engines" and balance["balanced_engines"] > 1 and balance["idle_share"] > 0
    else:
        assert "Both sides of an asynchronous step" in done.output and "engines would keep up" in done.output
