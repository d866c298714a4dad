"""`nemo-rl inspect` and `compare`: words in any order, what a run holds, and the answers to the old names."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from nemo_rl.cli.doors import RENAMED
from nemo_rl.cli.main import app, main
from tests.helpers.probe_recordings import one_site, write_recording
from tests.helpers.rollout_rows import usual_rows, write_rows

LEARNED = {"rewards": "rewards", "settings": "settings that differ", "steps": "steps"}
"""Key in JSON -> title in text."""


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    """Exit code and standard output."""
    with pytest.raises(SystemExit) as ended:
        app(list(map(str, args)))
    return int(ended.value.code or 0), capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str) -> str:
    """What a command says that ends with exit code 2."""
    monkeypatch.setattr("sys.argv", ["nemo-rl", *shlex.split(line)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Two logged steps, readable rollouts and records of the second."""
    run = tmp_path / "logs"
    write_rows(run, 2, usual_rows())
    rows = (
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "train/loss": 0.5},
        {"step": 2, "train/loss": 9.25},
        {"step": 2, "train/grad_norm": 3.0},
    )
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_recording(run / "steps" / "step_2" / "records", one_site(torch.ones(4)))
    return run


def test_a_run_says_what_it_holds_and_which_command_shows_it(log_dir: Path, capsys) -> None:
    code, shown = run(capsys, "inspect", log_dir)
    assert code == 0 and f"nemo-rl inspect {log_dir} step N rollouts" in shown and "steps 0 to 2" in shown
    assert "step before" not in shown and ["records", "step", "2"] in [line.split()[:3] for line in shown.splitlines()]
    assert f"nemo-rl compare {log_dir} OTHER_RUN step N" in shown and "kept steps" not in shown
    told = json.loads(run(capsys, "inspect", log_dir, "--json")[1])
    assert {part["name"]: part["steps"] for part in told["parts"]} == {
        "numbers": [0, 1, 2],
        "rollouts": [2],
        "records": [2],
    }


def test_a_step_is_shown_beside_the_one_before_it(log_dir: Path, capsys) -> None:
    code, shown = run(capsys, "inspect", log_dir, "step", "2")
    assert code == 0 and ["train/loss", "0.5", "9.25"] in [line.split() for line in shown.splitlines()]
    assert ["train/grad_norm", "nan", "3"] in [line.split() for line in shown.splitlines()]
    assert f"nemo-rl inspect {log_dir} step 2 rollouts" in shown
    assert "rollouts" not in run(capsys, "inspect", log_dir, "step", "1")[1]


def test_a_number_outside_of_three_standard_deviations_is_marked(tmp_path: Path, capsys) -> None:
    steps = [
        {"train/reward": 0.5 + 0.01 * (step % 2), "train/grad_norm": 1 + 0.1 * (step % 3), "rollout/engines": 2.0}
        for step in range(1, 13)
    ]
    steps[11] |= {"train/grad_norm": 1.6, "rollout/engines": 1.0}
    text = "".join(f"{json.dumps({'step': at, **row})}\n" for at, row in enumerate(steps, start=1))
    (tmp_path / "metrics.jsonl").write_text(text)
    shown = run(capsys, "inspect", tmp_path, "step", 12)[1].splitlines()
    assert "  unusual: 2" in shown and shown.index("  rewards") < shown.index("  rollout") < shown.index("  update")
    marked = [line.split()[0] for line in shown if line.endswith("!")]
    assert marked == ["rollout/engines", "train/grad_norm"]
    told = json.loads(run(capsys, "inspect", tmp_path, "step", 12, "--json")[1])
    assert told["unusual"]["rollout/engines"] == "2 in all 11 steps before"
    assert "std from 1.109, the mean of 11 steps" in told["unusual"]["train/grad_norm"]
    assert "  unusual: no number" in run(capsys, "inspect", tmp_path, "step", 11)[1]


def test_words_stand_in_any_order(log_dir: Path, capsys) -> None:
    lines = (
        "step 2 rollouts --limit 1",
        "rollouts step 2 --limit 1",
        "rollouts --limit 1 --step 2",
        "rollouts --step=2 --limit 1",
    )
    shown = {run(capsys, "inspect", log_dir, *shlex.split(line)) for line in lines}
    assert len(shown) == 1 and shown.pop()[0] == 0


def test_what_two_runs_recorded_of_a_step_is_compared(log_dir: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    other = tmp_path / "other"
    write_recording(
        other / "steps" / "step_2" / "records", one_site(torch.tensor([1.0, 1.0, 2.0, 1.0])), run_id="other"
    )
    code, shown = run(capsys, "compare", log_dir, other, "step", 2)
    assert code == 3 and "first train/logprob" in shown
    assert "has records of step 2; run with diagnostics.record.steps=[1]" in refused(
        capsys, monkeypatch, f"compare {log_dir} {other} step 1"
    )


def test_of_two_runs_the_first_number_that_differs_is_named_with_its_records(log_dir: Path, tmp_path, capsys) -> None:
    other = Path(shutil.copytree(log_dir, tmp_path / "other", ignore=shutil.ignore_patterns("records")))
    code, shown = run(capsys, "compare", log_dir, other, "--bits")
    assert code == 0 and shown.startswith("PASS: all 3 sites agree\n")
    assert "bits: PASS: all 3 sites agree\n" in run(capsys, "compare", log_dir, other)[1]
    rows = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    rows[2]["train/loss"] += 1e-15
    rows.append({"step": 3, "train/loss": 1.0})
    (other / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_recording(other / "records" / "step_2", one_site(torch.zeros(4)), run_id="other")
    code, shown = run(capsys, "compare", log_dir, other, "--bits", "--json", "--html", tmp_path / "page.html")
    told = json.loads(shown)
    assert "train/loss of step 2" in (tmp_path / "page.html").read_text()
    assert (code, told["first"]) == (3, "train/loss of step 2")
    assert "expected 9.25, got 9.250000000000002" in told["reason"]
    assert told["recorded"]["first_divergence"]["site"] == "train/logprob"
    assert told["findings"][0]["text"] == "one run alone has steps 3"
    code, shown = run(capsys, "compare", log_dir, other, "--json")
    whole = json.loads(shown)
    assert code == 3 and whole == {**told, **{name: whole[name] for name in LEARNED}}


def test_two_runs_are_compared_by_what_they_learned_first(tmp_path: Path, capsys) -> None:
    for name, gain in (("a", 0.1), ("b", 0.05)):
        rows = [{"step": 0, "val/accuracy": 0.25}]
        rows += [{"step": step, "train/reward": step * gain, "train/grad_norm": 1.0} for step in range(1, 11)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        config = f"grpo: {{max_num_steps: 10, seed: 1}}\nlogger: {{log_dir: {name}}}\npolicy: {{gain: {gain}}}\n"
        (tmp_path / name / "config.yaml").write_text(config)
    code, shown = run(capsys, "compare", tmp_path / "a", tmp_path / "b")
    lines = [line.split() for line in shown.splitlines()]
    heads = [lines.index([*title.split(), "A", "B", "B", "-", "A"]) for title in LEARNED.values()]
    assert code == 3 and heads == sorted(heads) and lines[heads[0] + 2][-3:] == ["0.8", "0.4", "-0.4"]
    assert lines[heads[1] + 1 : heads[2]] == [["policy.gain", "0.1", "0.05"], []]
    assert ["state", "ended", "ended"] in lines and lines[-2][0] == "bits:"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("inspect {run} step", "expected one whole number"),
        ("inspect {run} step 7", "expected the log folder of a run with step 7"),
        ("inspect {run} rollouts row a_g0", "takes no row"),
        ("inspect {run} tracer step 1", "takes no step"),
        ("inspect {run} rollouts routes", "expected one view, got rollouts and routes"),
        ("inspect {run} row", "expected the key of a row"),
        ("inspect {run} row a_g0 row b_g0", "expected one row and no step"),
        ("inspect nowhere", "got no folder"),
        ("inspect {run}/steps", "got step_2"),
        ("inspect {run} mismatch", "expected the number of a kept step"),
        ("compare {run}", "expected 2 of: folders of records"),
        ("compare {run} replay", "expected the number of a kept step"),
        ("compare {run} replay step 2 --to 4", "expected one of the two"),
        ("compare {run} replay step 2 --engines 4", "expected --conversations, too"),
    ],
)
def test_wrong_words_are_told(line: str, said: str, log_dir: Path, capsys, monkeypatch) -> None:
    assert said in refused(capsys, monkeypatch, line.format(run=log_dir)).replace("\n", " ")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("trace ls results/a --site 'mlp.out[1]'", "inspect results/a tracer --site 'mlp.out[1]'"),
        ("trace play results/a --headless", "inspect results/a play --headless"),
        ("trace verify logs/r3 --json", "inspect logs/r3 routes --json"),
        ("data-plane explain a_g0 --run results/a --json", "inspect results/a row a_g0 --json"),
        ("data-plane explain --run results/a a_g0", "inspect results/a row a_g0"),
        ("rollouts show results/a --step 3 --limit 2", "inspect results/a rollouts step 3 --limit 2"),
        ("replay results/a --step 3 --layout one --rows a_g0", "compare results/a replay step 3 --layout one row a_g0"),
        ("replay results/a --step 3 --explain-mismatch", "inspect results/a mismatch step 3"),
        ("probe compare a b --all", "compare a b --all"),
        ("probe compare --all a b", "compare A B --all a b"),
        ("replay", "compare RUN replay"),
        ("trace ls --help", "inspect RUN tracer --help"),
    ],
)
def test_an_old_name_answers_with_the_line_to_type(old: str, new: str, capsys, monkeypatch) -> None:
    assert refused(capsys, monkeypatch, old).rstrip().endswith(f"is now: nemo-rl {new}")


def test_every_old_name_answers_and_no_help_shows_one(capsys, monkeypatch) -> None:
    for old in RENAMED:
        assert f"`nemo-rl {old.split(' --')[0]}` is now: nemo-rl" in refused(capsys, monkeypatch, old)
    assert "replay" not in run(capsys, "--help")[1] and "verify" not in run(capsys, "trace", "--help")[1]


def test_the_help_has_each_command_in_a_sentence_below_its_kind(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, shown = run(capsys, "--help")
    headings = [line for line in shown.splitlines() if line[:1].isalpha()]
    assert code == 0 and [line for line in headings if line != "Options:"][1:] == ["Run:", "Look:", "Cluster:", "Data:"]
    below = shown.partition("Run:\n")[2]
    sentences = " ".join(below.split()).replace("Look: ", "").replace("Cluster: ", "").replace("Data: ", "")
    found = re.findall(r"([a-z-]+) ([A-Z][^.]*\.)(?: |$)", sentences)
    assert " ".join(map(" ".join, found)) == sentences and "..." not in sentences, "whole sentences and nothing else"
    visible = [name for name, command in get_command(app).commands.items() if not command.hidden]
    assert found[0][0] == "train" and sorted(name for name, _ in found) == sorted(visible)
    assert max(map(len, shown.splitlines())) <= 80
