"""`nemo-rl view`: the page of several runs in a headless Chromium, written and served, with hostile names in it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from nemo_rl.diagnostics.view.pages import write_pages
from nemo_rl.diagnostics.view.runs import MOST_POINTS, find_runs
from nemo_rl.errors import UserError
from nemo_rl.utils.files import wait_readable
from tests.helpers.browser import Browser, chromium_path

needs_browser = pytest.mark.skipif(
    not chromium_path(), reason="no Chromium is installed: chromium, chromium-browser, google-chrome"
)
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
STEPS = 3 * MOST_POINTS
START_S, END_S = 120.0, 60.0


def write_run(folder: Path, *, lr: float, steps: int = 20, name: str = "train/loss") -> None:
    folder.mkdir(parents=True)
    rows = [
        {"step": step, "train/reward": step * lr, name: 1 / step, "timing/step_s": 2.0} for step in range(1, 1 + steps)
    ]
    rows[-1]["val/accuracy"] = 0.5
    folder.joinpath("metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    folder.joinpath("config.yaml").write_text(f"policy:\n  optimizer: {{lr: {lr}}}\ngrpo: {{seed: 1}}\n")


@pytest.fixture
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write_run(folder / "a", lr=0.5)
    write_run(folder / "deep/b", lr=0.25, steps=STEPS)
    # Two folders, for whom the slash ends a name.
    write_run(folder / "c</script>", lr=0.5, name=HOSTILE)
    return folder


def test_runs_are_found_with_their_curves_thinned_and_their_settings(results: Path) -> None:
    records = {run.name: run.record() for run in find_runs(results)}
    assert list(records) == ["a", "c</script>", "deep/b"]
    steps, values = records["deep/b"]["curves"]["train/reward"]
    assert (
        len(steps) == len(values) <= MOST_POINTS + 1
        and steps[0] == 1
        and steps[-1] == STEPS == records["deep/b"]["steps"]
    )
    assert values == [step * 0.25 for step in steps]
    assert records["a"]["settings"] == {"policy.optimizer.lr": "0.5", "grpo.seed": "1"}
    assert find_runs(results / "a")[0].name == "a"


def test_a_folder_without_runs_and_a_folder_in_use_are_refused(tmp_path: Path, results: Path) -> None:
    with pytest.raises(UserError, match=r"no run is here.*expected a folder with metrics\.jsonl"):
        find_runs(tmp_path)
    tmp_path.joinpath("thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"expected a new folder, it has thesis\.txt"):
        write_pages(tmp_path, find_runs(results))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(chromium_path()) as browser:
        yield browser


@pytest.fixture
def quiet(browser: Browser) -> Iterator[Browser]:
    browser.complaints.clear()
    browser.requests.clear()
    yield browser
    browser.close_pages()
    assert browser.complaints == []


def titles(page) -> list[str]:
    return page.locator("figcaption").all_text_contents()


@needs_browser
def test_a_written_page_shows_runs_curves_and_differences_by_mouse_and_keyboard(
    quiet: Browser, results: Path, tmp_path: Path
) -> None:
    page = quiet.page()
    page.goto(write_pages(tmp_path / "page", find_runs(results)).as_uri())
    assert titles(page) == ["train/reward", "val/accuracy"]
    assert page.locator("#runs tbody tr").count() == 3 and page.locator("#charts canvas").count() == 2
    assert "0.25" in page.locator("#settings").inner_text() and "seed" not in page.locator("#settings").inner_text()
    page.get_by_label("show deep/b").uncheck()
    assert page.locator("#settings").inner_text() == "none"
    page.keyboard.press("2")
    assert titles(page) == ["train/loss"]
    page.keyboard.press("/")
    page.keyboard.type("onerror")
    assert titles(page) == [HOSTILE] and page.title() == "Runs"
    page.locator("summary").click()
    assert page.locator("figure td").all_text_contents()[1:] == ["20", "0.05", "0.05", "1"]
    kept = page.url
    page.goto("about:blank")
    page.goto(kept)
    assert titles(page) == [HOSTILE] and not page.get_by_label("show deep/b").is_checked()
    assert all(url.startswith(("file:", "about:")) for url in quiet.requests)


@needs_browser
def test_a_narrow_window_scrolls_in_one_direction_only(quiet: Browser, results: Path, tmp_path: Path) -> None:
    page = quiet.page(width=320, height=640)
    page.goto(write_pages(tmp_path / "page", find_runs(results)).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


@pytest.fixture
def served(results: Path) -> Iterator[str]:
    """The printed address of a server, which ends by Ctrl-C with 0."""
    command = [sys.executable, "-m", "nemo_rl.cli.main", "view", str(results)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        assert server.stdout is not None
        try:
            assert wait_readable(server.stdout.fileno(), timeout_s=START_S)
            said = server.stdout.readline().decode()
            found = re.match(r"(http://127\.0\.0\.1:\d+/\?token=\S+)  3 runs; Ctrl-C ends\n", said)
            assert found is not None, said
            yield found[1]
            server.send_signal(signal.SIGINT)
            assert server.wait(END_S) == 0, server.stdout.read().decode()
        finally:
            server.kill()


def asked(address: str, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=START_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@needs_browser
def test_a_served_page_needs_its_token_and_this_host_and_grows_with_the_run(
    quiet: Browser, served: str, results: Path
) -> None:
    assert asked(served, "/") == (401, b"open the address that nemo-rl view has printed\n")
    assert asked(served, "/data.js")[0] == asked(served, "/?token=guess")[0] == 401
    query = f"/?{urlsplit(served).query}"
    assert asked(served, query, Host="evil.example")[0] == 400
    page = quiet.page()
    page.goto(served)
    assert "token" not in page.url and titles(page) == ["train/reward", "val/accuracy"]
    write_run(results / "late", lr=1.0)
    page.reload()
    assert page.locator("#runs tbody tr").count() == 4
    cookie = "; ".join(f"{one['name']}={one['value']}" for one in page.context.cookies())
    for path in ("/../../runs.py", "/..%2Fruns.py", "/view", "/rollouts-0.html"):
        assert asked(served, path, Cookie=cookie)[0] == 404
    assert {urlsplit(url).netloc for url in quiet.requests} == {urlsplit(served).netloc}
