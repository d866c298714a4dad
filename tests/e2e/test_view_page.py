"""`nemo-rl view`: the page of several runs in a headless Chromium, written and served, with hostile names in it."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.data_plane.factory import build_data_plane_client
from nemo_rl.data_plane.ledger.events import EVENTS_FILE
from nemo_rl.errors import UserError
from nemo_rl.tracer.process import HubProcess, HubSpec
from nemo_rl.tracer.protocol import HubTokens
from nemo_rl.utils.files import wait_readable
from nemo_rl.utils.rollout_file import rollout_path
from nemo_rl_tools.view.pages import WRITTEN_STEPS, ViewPages
from nemo_rl_tools.view.runs import MOST_POINTS, find_runs, id_of
from nemo_rl_tools.view.tracers import OpenTracers
from tests.helpers.browser import Browser, chromium_path
from tests.helpers.data_planes import ids_column, keys_of
from tests.helpers.rollout_rows import token_row, write_rows
from tests.helpers.route_traces import RouteRun
from tests.helpers.tracer_recordings import FakeJob, small_recording

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
    runs = {run.name: run for run in find_runs(results)}
    assert list(runs) == ["a", "c</script>", "deep/b"]
    details = runs["deep/b"].details()
    axis, values = details["curves"]["train/reward"]
    steps = details["axes"][axis]
    assert len(steps) == len(values) <= MOST_POINTS + 1 and (steps[0], steps[-1]) == (1, STEPS)
    assert values == [step * 0.25 for step in steps]
    assert details["wall"] == (axis, [2.0 * step for step in steps]), "thinned after it was summed up"
    accuracy, _ = details["curves"]["val/accuracy"]
    assert details["axes"][accuracy] == [STEPS] and len(details["axes"]) == 2
    assert runs["a"].settings() == {"policy.optimizer.lr": "0.5", "grpo.seed": "1"}
    assert runs["deep/b"].overview()["steps"] == STEPS
    assert find_runs(results / "a")[0].name == "a"


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    rows = [{"step": step, "train/loss": float(at)} for at, step in enumerate((1, 2, 4, 3, 4, 5))]
    tmp_path.joinpath("metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    details = find_runs(tmp_path)[0].details()
    assert details["wall"] == (0, [0.0] * 5), "without times"
    assert details["axes"] == [[1, 2, 3, 4, 5]] and details["curves"]["train/loss"] == (0, [0.0, 1.0, 3.0, 4.0, 5.0])


def test_a_hub_of_another_machine_gets_no_token(tmp_path: Path) -> None:
    folder = small_recording(tmp_path / "tracer")
    HubTokens.draw().write(folder)
    tracers = OpenTracers()
    with closing(tracers), socket.create_server(("127.0.0.2", 0)) as other:  # any address that is not this machine's
        folder.joinpath("hub.json").write_text(json.dumps({"address": f"127.0.0.2:{other.getsockname()[1]}"}))
        address = tracers.address(tmp_path)
        assert urlsplit(address).hostname == "127.0.0.1" and tracers.address(tmp_path) == address


def test_the_table_has_the_newest_numbers_and_only_settings_that_differ(results: Path) -> None:
    text = ViewPages(results, is_served=True).read("data.js").decode()
    data = json.loads(text[text.index('{"') : text.rindex(";")])
    assert data["columns"] == ["reward", "validation", "loss", "step s", "tokens/s"]
    assert data["runs"][0]["numbers"] == [10.0, 0.5, 0.05, 2.0, None]
    assert [run["settings"] for run in data["runs"]] == [{"policy.optimizer.lr": lr} for lr in ("0.5", "0.5", "0.25")]
    state = data["runs"][0]["outcome"]
    assert state["state"] == "stopped" and state["cause"].startswith("at step 20") and state["seconds"] >= 0


def test_a_folder_without_runs_and_a_folder_in_use_are_refused(tmp_path: Path, results: Path) -> None:
    with pytest.raises(UserError, match=r"no run is here.*expected a folder with metrics\.jsonl"):
        ViewPages(tmp_path, is_served=False)
    tmp_path.joinpath("thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"expected a new folder, it has thesis\.txt"):
        written(results, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("kind", ["a page of somebody", "a link", "data of somebody", "a folder"])
def test_an_export_replaces_only_what_it_has_made(kind: str, tmp_path: Path, results: Path) -> None:
    folder, kept = tmp_path / "page", tmp_path / "kept"
    kept.write_text("mine")
    if kind in ("a link", "a folder"):
        written(results, folder)
        name = "index.html"
        (folder / name).unlink()
        (folder / name).mkdir() if kind == "a folder" else (folder / name).symlink_to(kept)
    else:
        name = "index.html" if kind == "a page of somebody" else "data.js"
        folder.mkdir()
        (folder / name).write_text("mine")
    with pytest.raises(UserError, match=f"expected a new folder, it has {name}; name another one"):
        ViewPages(results, is_served=False).write(folder)
    assert kept.read_text() == "mine" and (kind in ("a link", "a folder") or (folder / name).read_text() == "mine")


@pytest.mark.timeout(60)
def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    for name in ("good", "pipe", "huge", "odd"):
        write_run(tmp_path / name, lr=0.1)
    (tmp_path / "pipe" / "config.yaml").unlink()
    os.mkfifo(tmp_path / "pipe" / "config.yaml")
    (tmp_path / "huge" / "metrics.jsonl").write_text(f'{{"step": 1, "train/reward": {10**400}, "train/loss": 2}}\n')
    (tmp_path / "odd" / "rollouts").mkdir()
    (tmp_path / "odd" / "rollouts" / f"step_{'9' * 200}.jsonl").write_text("")
    pages = ViewPages(tmp_path, is_served=True)
    table = pages.read("data.js") or b""
    assert all(f'"{name}"'.encode() in table for name in ("good", "pipe", "huge"))
    assert all(pages.read(f"run-{run.id}.js") for run in find_runs(tmp_path))


def written(results: Path, folder: Path) -> str:
    """Return the address of a page that is written as files."""
    return ViewPages(results, is_served=False).write(folder).as_uri()


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
    return page.locator("#charts figcaption").all_text_contents()


def await_titles(page, *names: str) -> None:
    """Wait until the curves of the chosen runs are read and drawn."""
    shown = "[...document.querySelectorAll('#charts figcaption')].map(each => each.textContent)"
    page.wait_for_function(f"names => JSON.stringify({shown}) === JSON.stringify(names)", arg=names)


@needs_browser
def test_a_written_page_shows_runs_curves_and_differences_by_mouse_and_keyboard(
    quiet: Browser, results: Path, tmp_path: Path
) -> None:
    page = quiet.page()
    page.goto(written(results, tmp_path / "page"))
    await_titles(page, "train/reward", "val/accuracy")
    assert page.locator("#runs tbody tr").count() == 3 and page.locator("#charts canvas").count() == 2
    assert "0.25" in page.locator("#settings").inner_text() and "seed" not in page.locator("#settings").inner_text()
    page.get_by_label("show deep/b").uncheck()
    assert page.locator("#settings").inner_text() == "none"
    page.keyboard.press("2")
    assert titles(page) == ["train/loss"]
    page.keyboard.press("9")
    assert titles(page) == ["train/reward", "val/accuracy", "train/loss", HOSTILE, "timing/step_s"]
    page.keyboard.press("/")
    page.keyboard.type("onerror")
    assert titles(page) == [HOSTILE] and page.title() == "Runs"
    page.locator("summary").click()
    assert page.locator("figure td").all_text_contents()[1:] == ["20", "0.05", "0.05", "1"]
    kept = page.url
    page.goto("about:blank")
    page.goto(kept)
    await_titles(page, HOSTILE)
    assert not page.get_by_label("show deep/b").is_checked()
    page.get_by_label("show a").uncheck()
    page.get_by_role("link", name="a", exact=True).click()
    page.wait_for_selector("#one canvas")
    assert page.locator("#one figcaption").all_text_contents() == ["Reward", "Validation"]
    assert (
        page.locator("#one .state").inner_text() == "stopped" and "0.5 \u2192 10" in page.locator("#one").inner_text()
    )
    page.get_by_label("over").select_option("wall time")
    page.locator("#one figure").first.hover()
    passed, reward = page.locator("#one .at").first.inner_text().split(" s ")
    assert float(reward) == float(passed) / 4, "2 s and a reward of 0.5 for each step"
    page.get_by_label("smoothing").fill("0.9")
    assert "axis=wall" in page.url and "smooth=0.9" in page.url
    page.locator("h1").focus()
    page.keyboard.press("Escape")
    assert not page.get_by_label("show a").is_checked() and page.get_by_label("show c").is_checked()
    assert all(url.startswith(("file:", "about:")) for url in quiet.requests)


@needs_browser
def test_a_narrow_window_scrolls_in_one_direction_only(quiet: Browser, results: Path, tmp_path: Path) -> None:
    page = quiet.page(width=320, height=640)
    page.goto(written(results, tmp_path / "page"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


@contextmanager
def serving(results: Path, *, num_runs: int) -> Iterator[str]:
    """The printed address of a server, which ends by Ctrl-C with 0."""
    command = [sys.executable, "-m", "nemo_rl.cli.main", "view", str(results)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        assert server.stdout is not None
        try:
            assert wait_readable(server.stdout.fileno(), timeout_s=START_S)
            said = server.stdout.readline().decode()
            found = re.match(rf"(http://127\.0\.0\.1:\d+/\?token=\S+)  {num_runs} runs; Ctrl-C ends\n", said)
            assert found is not None, said
            yield found[1]
            server.send_signal(signal.SIGINT)
            assert server.wait(END_S) == 0, server.stdout.read().decode()
        finally:
            server.kill()


@pytest.fixture
def served(results: Path) -> Iterator[str]:
    with serving(results, num_runs=3) as address:
        yield address


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
    assert "token" not in page.url
    await_titles(page, "train/reward", "val/accuracy")
    write_run(results / "late", lr=1.0)
    page.reload()
    assert page.locator("#runs tbody tr").count() == 4
    cookie = "; ".join(f"{one['name']}={one['value']}" for one in page.context.cookies())
    for path in ("/../../runs.py", "/..%2Fruns.py", "/view", f"/rollouts-{id_of('a')}.html", f"/run-{'0' * 12}.js"):
        assert asked(served, path, Cookie=cookie)[0] == 404
    assert {urlsplit(url).netloc for url in quiet.requests} == {urlsplit(served).netloc}


STAGES = {"rollout": 1.0, "train": 3.0, "refit": 0.5, "validation": 0.25, "score": 0.1, "log": 0.1, "keep_step": 0.05}
NUM_STEPS = WRITTEN_STEPS + 2
NAME = "one run"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A folder with one run that has everything: stages, engines, rollouts, events, a trace of routes, a recording."""
    run = tmp_path / "results" / NAME
    write_run(run, lr=0.5, steps=NUM_STEPS)
    with run.joinpath("metrics.jsonl").open("w") as file:
        for step in range(1, NUM_STEPS + 1):
            row = {f"timing/{stage}_s": seconds * step for stage, seconds in STAGES.items()}
            row |= {"timing/step_s": 4.0 * step, "rollout/engine_0/tokens_per_s": 100.0 * step}
            row |= {"train/token_mult_prob_error": 1 + step % 3, "rollout/staleness_max": 1.0, "r3/k3_r3": 1e-5}
            file.write(json.dumps({"step": step, **row}) + "\n")
    for step in range(1, NUM_STEPS + 1):
        write_rows(run, step, [token_row("u0_g0", [f"answer {step}"]), token_row("u9_g9", ["<b>"], apart={0: 0.7})])
    client = build_data_plane_client(DataPlaneConfig(impl="noop"), run_id="job", log_dir=run)
    client.register_partition("train", ["input_ids", "sample_mask"], 99, ["train"])
    with client.stage("rollout"):
        columns = {"input_ids": ids_column([2] * 4), "sample_mask": torch.ones(4)}
        client.kv_batch_put(keys_of(1), "train", columns, [{}] * 4)
    client.kv_clear(["u0_g0"], "train", reason="<i>equal</i> rewards")
    client.close()
    shutil.copytree(RouteRun(tmp_path / "trace").write(), run / "r3_trace")
    small_recording(run / "tracer")
    return run


def test_a_page_that_is_written_again_holds_no_older_rollouts(whole: Path, tmp_path: Path) -> None:
    for newest in (NUM_STEPS, NUM_STEPS + 1):
        write_rows(whole, newest, [token_row("u0_g0", ["answer"])])
        written(whole.parent, tmp_path / "page")
        names = {path.name for path in (tmp_path / "page").glob("rollouts-*")}
        steps = range(newest - WRITTEN_STEPS + 1, newest + 1)
        assert names == {f"rollouts-{id_of(NAME)}-{step}.html" for step in steps}


def go_to_part(page, part: str) -> None:
    """Follow the link to the run, and choose a part of it by its key."""
    if page.locator("#one").is_hidden():
        page.get_by_role("link", name=NAME).click()
    page.wait_for_selector("#one h2")
    page.locator("h1").focus()  # a digit in a field is a digit
    parts = ["learning", "time", "rollouts", "rows", "routes", "tracer"]
    page.keyboard.press(str(1 + parts.index(part)))
    page.wait_for_selector(f"#one section[aria-label={part}] h2")


def cells(page, table: int) -> list[list[str]]:
    rows = page.locator("#one table").nth(table).locator("tbody tr")
    return [[cell.strip() for cell in row.locator("td").all_text_contents()] for row in rows.all()]


def check_time(page) -> None:
    go_to_part(page, "time")
    assert page.locator("#one canvas").count() == 2
    rows = {row[0]: row[1:] for row in cells(page, 0)}
    assert list(rows)[:3] == ["train", "rollout", "refit"] and rows["train"] == ["21", "60", "12"]
    assert rows["step, rollout to update"] == ["28", "", "16"] and cells(page, 1) == [["engine 0", "700", "400"]]
    page.get_by_role("spinbutton", name="step").fill("2")
    assert cells(page, 0)[0] == ["train", "6", "60", "12"] and cells(page, 1)[0][1] == "200"


@needs_browser
def test_a_served_run_shows_time_rollouts_rows_routes_and_tracer(quiet: Browser, whole: Path) -> None:
    with serving(whole.parent, num_runs=1) as address:
        page = quiet.page()
        page.goto(address)
        check_time(page)
        go_to_part(page, "rollouts")
        page.get_by_role("spinbutton", name="step").fill("1")
        page.keyboard.press("Enter")
        page.wait_for_selector("article")
        assert "answer 1" in page.locator("pre.response").first.inner_text()
        page.get_by_role("link", name="after: step 2").click()
        page.get_by_role("link", name="newest: step 7").click()
        assert page.locator("h1").inner_text().endswith(f"step {NUM_STEPS}") and page.locator(".far").count() == 2
        page.get_by_role("link", name="u0_g0").click()
        page.wait_for_selector("#one table")
        assert [row[2] for row in cells(page, 0)] == ["made", "clear"]
        assert "stage rollout" in cells(page, 0)[0][4] and "because: <i>equal</i> rewards" in cells(page, 0)[1][4]
        assert "dropped: <i>equal</i> rewards" in page.locator("#one").inner_text()
        page.get_by_label("key").fill("u0_g3")
        page.keyboard.press("Enter")
        page.locator("#one b", has_text="u0_g3").wait_for()
        assert "live, not trained yet" in page.locator("#one").inner_text()
        page.get_by_label("key").fill("nobody")
        page.keyboard.press("Enter")
        assert "names it; expected a key" in page.locator(".problem").inner_text()
        go_to_part(page, "routes")
        assert cells(page, 0) == [["r3/k3_r3", "1E-5", "1E-5"]] and "PASS" not in page.locator("#one").inner_text()
        page.get_by_role("button", name=f"check {NAME}/r3_trace").click()
        assert page.locator(".verdict").inner_text() == "PASS"
        assert "all 6 sites agree" in page.locator("#one").inner_text()
        go_to_part(page, "tracer")
        with page.context.expect_page() as opened:
            page.get_by_role("link", name="open the tracer").click()
        opened.value.get_by_text("A recording").wait_for()
        assert urlsplit(opened.value.url).netloc != urlsplit(page.url).netloc
        opened.value.close()
        page.keyboard.press("Escape")
        assert page.locator("#all").is_visible() and page.title() == "Runs"
        page.keyboard.press("3")
        await_titles(page, "train/token_mult_prob_error", "r3/k3_r3")
        assert "diagnostics.keep_steps.enabled=true" in page.locator("#note").inner_text()
        page.keyboard.press("4")
        await_titles(page, "rollout/staleness_max")
    assert {urlsplit(url).hostname for url in quiet.requests} == {"127.0.0.1"}


@needs_browser
def test_a_written_run_has_its_newest_rollouts_and_their_rows(quiet: Browser, whole: Path, tmp_path: Path) -> None:
    page = quiet.page(width=320, height=640)
    page.goto(written(whole.parent, tmp_path / "page"))
    check_time(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    go_to_part(page, "rollouts")
    assert page.locator(".steps a").all_text_contents() == ["step 7", "step 6", "step 5", "step 4", "step 3"]
    assert "the newest 5 of 7 steps" in page.locator("#one").inner_text()
    page.get_by_role("link", name="step 7").click()
    assert page.get_by_role("link", name="before: step 6").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page.get_by_role("link", name="u0_g0").click()
    page.wait_for_selector("#one table")
    assert [row[2] for row in cells(page, 0)] == ["made", "clear"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page.get_by_label("key").fill("u0_g3")
    page.keyboard.press("Enter")
    assert "newest 5 steps with rollouts alone" in page.locator(".problem").inner_text()
    go_to_part(page, "routes")
    assert page.get_by_role("button").count() == 0 and "r3_trace' routes" in page.locator("#one").inner_text()
    go_to_part(page, "tracer")
    assert "play" in page.locator(".command").inner_text() and page.get_by_text("open the tracer").count() == 0
    assert all(url.startswith("file:") for url in quiet.requests)


@needs_browser
def test_damaged_files_are_told_in_a_sentence(quiet: Browser, whole: Path) -> None:
    whole.joinpath(EVENTS_FILE).write_text('{"event": \n')
    rollout_path(whole, 2).write_text('{"key": "u0_g0", "prom')
    next(whole.joinpath("r3_trace").glob("*")).write_text("[]\n[]\n")
    with serving(whole.parent, num_runs=1) as address:
        page = quiet.page()
        page.goto(address)
        run = id_of(NAME)
        page.goto(f"{page.url.partition('#')[0]}rollouts-{run}-2.html")
        assert "line 1: expected a row of readable rollouts" in page.locator("p").inner_text()
        page.get_by_role("link", name="after: step 3").click()
        page.get_by_role("link", name="u0_g0").click()
        assert f"{EVENTS_FILE}: line 1: expected an event" in page.locator(".problem").inner_text()
        go_to_part(page, "routes")
        page.get_by_role("button", name="check").click()
        assert page.locator(".verdict").inner_text() == "INCOMPLETE"


@needs_browser
def test_new_paths_need_the_token_and_a_missing_tracer_is_said(quiet: Browser, whole: Path) -> None:
    run, trace = id_of(NAME), id_of(f"{NAME}/r3_trace")
    with serving(whole.parent, num_runs=1) as address:
        paths = (f"run-{run}.js", f"rollouts-{run}-1.html", f"row-{run}.js?key=u0_g0", f"rows-{run}.js")
        for path in (*paths, f"trace-{trace}.js", f"tracer-{run}", "base.css", "curves.js"):
            assert asked(address, f"/{path}")[0] == 401, path
        page = quiet.page()
        page.goto(address)
        cookie = "; ".join(f"{one['name']}={one['value']}" for one in page.context.cookies())
        for path in (*paths, f"trace-{trace}.js"):
            assert asked(address, f"/{path}", Cookie=cookie)[0] == 200, path
        whole.joinpath("tracer/stream_00001.nrt").unlink()
        status, said = asked(address, f"/tracer-{run}", Cookie=cookie)
        assert status == 404 and b"expected a recording" in said


@needs_browser
def test_a_run_that_is_on_leads_to_its_own_hub(quiet: Browser, whole: Path) -> None:
    spec = HubSpec(folder=whole / "tracer", run="run-1", start_timeout_s=START_S, watches=("layer.out | stats",))
    with HubProcess(spec) as hub, serving(whole.parent, num_runs=1) as address:
        job = FakeJob(hub.address, hub.tokens.job)
        job.step(1)
        page = quiet.page()
        page.goto(address)
        go_to_part(page, "tracer")
        assert "tracer/open.html" in page.locator("#one").inner_text()
        with page.context.expect_page() as opened:
            page.get_by_role("link", name="open the tracer").click()
        opened.value.get_by_role("heading", name="Tensor tracer").wait_for()
        assert urlsplit(opened.value.url).netloc == hub.address
        job.close()
