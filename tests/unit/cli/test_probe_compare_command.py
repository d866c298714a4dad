"""`nemo-rl compare`: exit codes, outputs, and paths that cannot be read or written."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.helpers.probe_recordings import one_site, write_recording


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A recording, one like it, and one that differs; names are such that shells dislike."""
    equal, other = torch.ones(4), torch.tensor([1, 1, 1.25, 1])
    names = ("the 'first' one", 'and "that"', "other")
    values = (equal, equal, other)
    first, like, differing = (
        write_recording(tmp_path / name, one_site(value)) for name, value in zip(names, values, strict=True)
    )
    return first, like, differing


@contextmanager
def no_room() -> Iterator[None]:
    """No file of this process may grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_verdict_is_the_exit_code(folders, tmp_path: Path, ended) -> None:
    a, b, other = folders
    code, shown, _ = ended("compare", a, b)
    assert code == 0 and shown.startswith("PASS: all 1 sites agree within their limits, 1 of them bit by bit\n")
    code, shown, _ = ended("compare", a, other)
    assert code == 3 and shown.startswith("MISMATCH: 1 of 1 sites differ, first train/logprob: max_abs 0.25 > 0.0001\n")
    assert "  sample 's0', position 2, token 2: 1 against 1.25 at 0, token_rel 0.25\n" in shown
    code, shown, _ = ended("compare", a, a)
    assert code == 5 and shown.startswith("VACUOUS: ")
    (b / "rank_00000.end").unlink()
    assert ended("compare", a, b)[0] == 4
    (b / "rank_00000.bin").write_bytes(b"x" * 200)
    assert ended("compare", a, b)[0] == 6
    assert ended("compare", a, write_recording(tmp_path / "m", one_site(torch.ones(1)), model={}))[0] == 7


def test_json_and_all(folders, ended) -> None:
    a, b, other = folders
    code, shown, _ = ended("compare", a, other, "--json", "--noise", b)
    told = json.loads(shown)
    assert (told["verdict"], told["exit_code"], code) == ("mismatch", 3, 3)
    assert told["sites"][0]["metrics"]["max_abs"] == 0.25
    assert told["first_divergence"] == {"site": "train/logprob", "after": None}
    rule = '- {sites: "logprob", direction: "forward", metric: "max_abs", max: 1e-07}'
    assert told["proposed_limits"].splitlines()[1:] == [rule]
    assert "train/logprob" not in ended("compare", a, b)[1] and "train/logprob" in ended("compare", a, b, "--all")[1]


def test_limits_are_proposed_written_and_used(folders, tmp_path: Path, ended) -> None:
    a, b, other = folders
    code, shown, _ = ended("compare", a, b, "--noise", other, "--propose", tmp_path / "made" / "limits.yaml")
    assert code == 0 and (tmp_path / "made" / "limits.yaml").read_text() in shown
    assert ended("compare", a, other, "--limits", tmp_path / "made" / "limits.yaml")[0] == 0


def test_errors_of_the_user_are_one_line(folders, tmp_path: Path, ended) -> None:
    a, b, _ = folders
    (tmp_path / "bad.yaml").write_text("- {sites: logprob, metric: max_abs, maximum: 1, max: 1}")
    (tmp_path / "file").write_text("")
    cases = (
        ((a, tmp_path / "absent"), "not a folder of records"),
        ((tmp_path / "file", b), "not a folder of records"),
        ((a, b, "--limits", tmp_path / "bad.yaml"), "bad.yaml: rule 1: unknown key 'maximum'"),
        ((a, b, "--limits", tmp_path / "absent.yaml"), "absent.yaml: cannot be read: No such file"),
        ((a, b, "--propose", tmp_path / "p.yaml"), "name them with --noise DIR"),
        ((a, b, "--noise", a), "are not recordings of the same run"),
        ((a, b, "--html", tmp_path / "file" / "page.html"), "correct the path"),
        ((a, b, "--html", "/proc/page.html"), "No such file or directory"),
    )
    for args, words in cases:
        code, shown, error = ended("compare", *args)
        assert code == 2 and shown == "" and words in error, (args, error)
        assert error.count("\n") == 1 and "Traceback" not in error


def test_a_full_disk_is_told_and_leaves_the_old_page(folders, tmp_path: Path, ended) -> None:
    a, b, _ = folders
    out = tmp_path / "out"
    assert ended("compare", a, b, "--html", out / "page.html")[0] == 0
    before = (out / "page.html").read_text()
    with no_room():
        code, _, error = ended("compare", a, b, "--html", out / "page.html")
    assert code == 2 and "File too large; the limit on the size of a file is reached" in error
    assert (out / "page.html").read_text() == before and [path.name for path in out.iterdir()] == ["page.html"]
