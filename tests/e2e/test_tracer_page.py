"""The page of the live tracer in a headless Chromium, on a real hub: numbers, time, runs, states, hostile texts."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.frame import Frame, FrameSite, FrameTable, Where
from nemo_rl.tracer.protocol import HubTokens
from nemo_rl.tracer.reducer import parse_reducer
from tests.helpers.browser import Browser, chromium_path
from tests.helpers.data_planes import wait_until
from tests.helpers.tracer_demo import DemoHub, DemoRun

pytestmark = [
    pytest.mark.skipif(
        not chromium_path(), reason="no Chromium is installed: chromium, chromium-browser, google-chrome"
    ),
    pytest.mark.timeout(300),
]
IS_HERE = "count => window.tracer?.runs[0]?.steps.length >= count"
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
FLOATS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(chromium_path()) as browser:
        yield browser


@pytest.fixture
def feed(browser: Browser) -> Iterator[DemoHub]:
    browser.close_pages()  # of a test that failed
    browser.complaints.clear()
    browser.requests.clear()
    with DemoHub() as feed:
        yield feed
        browser.close_pages()
    hosts = {
        url.partition("//")[2].partition("/")[0] for url in browser.requests if not url.startswith(("blob:", "data:"))
    }
    assert hosts <= {f"127.0.0.1:{feed.port}"}
    assert browser.complaints == []


def opened(browser, feed, *, steps=1, token=None, **how):
    page = browser.page(**how)
    page.goto(feed.url(token))
    page.wait_for_function(IS_HERE, arg=steps)
    page.wait_for_function("() => tracer.isComplete")
    browser.settle(page)
    return page


def shown_numbers(page):
    return list(csv.DictReader(io.StringIO(page.evaluate("() => tracer.csv()"))))


def numbers(texts):
    return np.array([FLOATS.get(text, text) for text in texts], dtype=np.float64)


def test_numbers_of_all_reducers_are_those_that_were_sent(browser, feed):
    run = DemoRun(bad_step=1)
    where = FrameSite(SiteKind.ATTN_OUT, layer=1, direction=Direction.BACKWARD, is_recomputed=True)
    linear = Where(run.run, 1, "prev_logprobs", where, parse_reducer("histogram(-1, 1, 3)"), update=2)
    sent = [*run.frames(1), Frame(where=linear, payload=np.array([1, 2, 2**60, 4, 5]))]
    feed.begin(run)
    feed.publish(run.table(1), *sent)
    page = opened(browser, feed)
    assert {str(frame.where.reducer).partition("(")[0] for frame in sent} == {
        "stats", "histogram", "tiles", "project", "full", "counts", "topk", "norm", "digest",
    }  # fmt: skip
    asked = [{**frame.where.as_record(), "site": frame.where.site.text} for frame in sent]
    found = page.evaluate("places => places.map(place => tracer.value(place))", asked)
    for frame, numbers_there in zip(sent, found, strict=True):
        assert numbers_there["shape"] == list(frame.payload.shape), frame.where
        if frame.payload.dtype == np.int64:
            assert [int(value) for value in numbers_there["values"]] == frame.payload.tolist()
        else:
            assert np.array_equal(numbers(numbers_there["values"]), frame.payload.ravel(), equal_nan=True), frame.where


def test_a_cell_under_the_pointer_says_its_exact_number(browser, feed):
    run = DemoRun()
    feed.begin(run)
    feed.step(run, 1)
    page = opened(browser, feed)
    frame = next(found for found in run.frames(1) if found.where.site.layer == 3 and "rms" in str(found.where.reducer))
    place = page.evaluate("() => tracer.cellPlace(3, 7)")
    page.mouse.move(place["x"], place["y"])
    tooltip = page.locator(".tooltip dd").all_text_contents()
    assert float(tooltip[0]) == float(frame.payload[7, 0])
    assert tooltip[1:] == ["·:", str(run.table(1).tokens[2, 7]), "7", "layer.out[3]", "prompt-1/sample-0"]
    browser.settle(page)
    # What is drawn late moves the cells.
    place = page.evaluate("() => tracer.cellPlace(3, 7)")
    page.mouse.click(place["x"], place["y"])
    page.mouse.move(5, 5)
    browser.settle(page)
    assert page.locator(".reading").text_content().startswith("layer.out[3], token 7 “·:”: ")
    page.keyboard.press("Shift+ArrowRight")
    browser.settle(page)
    assert page.locator(".reading").text_content().startswith("layer.out[3], token 8 “⏎”: ")


def test_a_chart_says_exact_numbers_goes_to_a_step_and_zooms(browser, feed):
    run = DemoRun()
    feed.begin(run)
    for step in range(1, 21):
        feed.step(run, step)
    page = opened(browser, feed, steps=20)
    page.keyboard.press("6")
    browser.settle(page)
    chart = page.locator(".chart", has_text="train/loss")
    box = chart.locator(".u-over").bounding_box()

    def place_of(step, first=1, last=20):
        return box["x"] + box["width"] * (step - first) / (last - first), box["y"] + box["height"] / 2

    page.mouse.move(*place_of(7.2))
    assert page.locator(".tooltip strong").text_content() == "train/loss, step 7"
    assert float(page.locator(".tooltip dd").text_content()) == run.metrics(7)["train/loss"]
    page.mouse.click(*place_of(7.2))
    page.wait_for_function("() => tracer.step === 7 && !tracer.isFollowing")
    page.mouse.move(*place_of(10))
    page.mouse.down()
    page.mouse.move(*place_of(13), steps=4)
    page.mouse.up()
    assert page.evaluate("() => tracer.step") == 7  # dragging is no click
    feed.step(run, 21)
    page.wait_for_function("() => document.querySelector('.range').textContent.endsWith('21')")
    browser.settle(page)
    page.mouse.move(*place_of(11.8, first=10, last=13))  # zoomed, also after a new step
    assert page.locator(".tooltip strong").text_content() == "train/loss, step 12"
    page.mouse.dblclick(*place_of(11.8, first=10, last=13))
    page.wait_for_function("() => tracer.step !== 7")
    browser.settle(page)
    page.mouse.move(*place_of(3, last=21))
    assert page.locator(".tooltip strong").text_content() == "train/loss, step 3"


def test_colours_of_the_heat_map_are_chosen(browser, feed):
    run = DemoRun()
    feed.begin(run)
    feed.step(run, 1)
    page = opened(browser, feed)
    drawn = "() => document.querySelector('.heat-scroll canvas').toDataURL()"
    pictures = set()
    for kind in ("log", "linear", "middle", "layer"):
        page.get_by_label("Colours", exact=True).select_option(kind)
        browser.settle(page)
        pictures.add(page.evaluate(drawn))
    assert len(pictures) == 4


def test_the_csv_holds_what_the_views_show(browser, feed):
    run = DemoRun()
    feed.begin(run)
    feed.step(run, 1)
    page = opened(browser, feed)
    sent = {(frame.where.site.text, str(frame.where.reducer)): frame for frame in run.frames(1)}
    rows = [row for row in shown_numbers(page) if row["site"] == "layer.out[2]"]
    length = len(run.pieces[0])
    assert [row["token"] for row in rows[:3]] == ["Sort", "·these", "·numbers"]
    assert np.array_equal(
        numbers([row["value"] for row in rows]), sent["layer.out[2]", "tiles(1, rms)"].payload[:length, 0]
    )
    page.keyboard.press("2")
    [row] = [row for row in shown_numbers(page) if row["site"] == "layer.out[2]"]
    stats = sent["layer.out[2]", "stats"].payload
    assert (float(row["sum"]), float(row["rms"])) == (stats[1], pytest.approx(np.sqrt(stats[2] / stats[0]), rel=1e-15))
    page.keyboard.press("3")
    counts = [int(row["tokens"]) for row in shown_numbers(page) if row["site"] == "moe.topk_ids[4]"]
    assert counts == sent["moe.topk_ids[4]", "counts"].payload.tolist()
    page.keyboard.press("4")
    assert [int(row["count"]) for row in shown_numbers(page)] == sent["layer.out[3]", "histogram"].payload.tolist()
    page.keyboard.press("5")
    best = sent["logits", "topk(5)"].payload[:length]
    assert np.array_equal(numbers([row["value"] for row in shown_numbers(page)]), best[..., 0].ravel())
    page.keyboard.press("6")
    assert {row["metric"]: float(row["value"]) for row in shown_numbers(page)} == run.metrics(1)
    with page.expect_download() as download:
        page.keyboard.press("c")
    assert download.value.suggested_filename == "trace-run-a-metrics-step1.csv"
    assert Path(download.value.path()).read_bytes().decode() == page.evaluate("() => tracer.csv()")


def test_values_that_are_not_finite_are_told_and_found(browser, feed, tmp_path):
    run = DemoRun(bad_step=3)
    feed.begin(run)
    for step in (1, 2):
        feed.step(run, step)
    page = opened(browser, feed, steps=2)
    assert "finite" in page.locator(".notice").text_content()
    feed.step(run, 3)
    page.wait_for_selector(".notice[data-level=bad]")
    notice = page.locator(".notice .text").text_content()
    assert notice == "NaN or infinite: first at step 3, train, mlp.out[3] (6 values are not finite)."
    feed.step(run, 4)
    page.wait_for_function("() => tracer.step === 4")
    page.keyboard.press("n")
    page.wait_for_function("() => tracer.step === 3 && !tracer.isFollowing && tracer.view === 'tokens'")
    browser.settle(page)
    values = {row["site"]: row for row in shown_numbers(page) if row["position"] == "5" and row["number"] == "0"}
    assert values["mlp.out[3]"]["value"] == "NaN"
    assert np.isfinite(float(values["mlp.out[2]"]["value"]))
    for view in range(1, 8):
        page.keyboard.press(str(view))
        browser.settle(page)
        page.screenshot(path=str(tmp_path / f"not_finite_{view}.png"))
    rows = shown_numbers(page)
    assert [(row["site"], row["not_finite"], row["nan"], row["posinf"], row["neginf"]) for row in rows[:2]] == [
        ("mlp.out[3]", "6", "4", "1", "1"),
        ("mlp.out[4]", "6", "4", "1", "1"),
    ]


def test_time_stays_and_goes_back_while_the_run_goes_on(browser, feed):
    run = DemoRun()
    feed.begin(run)
    for step in (1, 2, 3):
        feed.step(run, step)
    page = opened(browser, feed, steps=3)
    assert page.evaluate("() => [tracer.step, tracer.isFollowing]") == [3, True]
    page.keyboard.press(" ")
    feed.step(run, 4)
    page.wait_for_function(IS_HERE, arg=4)
    assert page.evaluate("() => tracer.step") == 3
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => tracer.step === 2")
    assert {row["step"] for row in shown_numbers(page)} == {"2"}
    page.keyboard.press("Home")
    page.wait_for_function("() => tracer.step === 1")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => tracer.step === 2")
    page.keyboard.press("End")
    page.wait_for_function("() => tracer.step === 4 && tracer.isFollowing")


def test_who_comes_late_gets_the_steps_before(browser, feed):
    run = DemoRun()
    feed.begin(run)
    for step in range(990, 1000):
        feed.step(run, step)
    page = opened(browser, feed, steps=10)
    assert page.evaluate("() => tracer.runs[0].steps") == list(range(990, 1000))
    page.keyboard.press("6")
    assert len({row["step"] for row in shown_numbers(page)}) == 10


def test_memory_is_bounded_and_what_has_gone_is_asked_for_again(browser, feed):
    run = DemoRun()
    feed.begin(run)
    for step in (1, 2, 3, 4):
        feed.step(run, step)
    page = browser.page()
    page.route("**/main.js", lambda route: _with_budget(route, "220 << 10"))
    page.goto(feed.url())
    page.wait_for_function(IS_HERE, arg=4)
    page.wait_for_function("() => tracer.bytes < 220 << 10")
    place = {"run": run.run, "step": 1, "site": "layer.out[0]", "reducer": "tiles(1, rms)"}
    page.evaluate("() => tracer.go(1)")
    page.wait_for_function("place => tracer.value(place) !== null", arg=place)
    page.wait_for_function("() => document.querySelector('.pane-title').textContent.includes('step 1 ')")
    wait_until(lambda: len(shown_numbers(page)) == 6 * len(run.pieces[0]))


def test_what_goes_while_its_answer_comes_is_asked_for_once_more(browser, feed):
    run = DemoRun()
    feed.begin(run)
    for step in (1, 2, 3, 4):
        feed.step(run, step)
    page, clients, held, is_holding = browser.page(), [], [], Event()

    def meddle(client):
        hub = client.connect_to_server()
        hub.on_message(lambda message: held.append(message) if is_holding.is_set() else client.send(message))
        client.on_message(hub.send)
        clients.append(client)

    def look_at(step):
        page.evaluate("step => tracer.go(step)", step)
        page.wait_for_function("step => tracer.step === step", arg=step)

    page.route_web_socket("**/live", meddle)
    page.route("**/main.js", lambda route: _with_budget(route, "220 << 10"))
    page.goto(feed.url())
    page.wait_for_function("() => tracer.isComplete")
    place = {"run": run.run, "step": 1, "site": "layer.out[0]", "reducer": "tiles(1, rms)"}
    look_at(4)
    assert page.evaluate("place => tracer.value(place)", place) is None
    is_holding.set()
    look_at(1)
    wait_until(lambda: page.title() and any(isinstance(one, str) and '"done"' in one for one in held))
    look_at(4)
    is_holding.clear()
    for message in held:
        clients[0].send(message)
    look_at(1)
    page.wait_for_function("place => tracer.value(place) !== null", arg=place)


def _with_budget(route, budget):
    answer = route.fetch()
    assert "256 << 20" in answer.text()
    route.fulfill(response=answer, body=answer.text().replace("256 << 20", budget))


def test_a_lost_hub_is_said_and_found_again(browser):
    browser.complaints.clear()
    run, tokens = DemoRun(), HubTokens.draw()
    with DemoHub(tokens=tokens) as feed:
        feed.begin(run)
        feed.step(run, 1)
        page = opened(browser, feed)
    page.wait_for_function("() => tracer.said.connection.startsWith('lost since')")
    assert page.evaluate("() => tracer.runs[0].steps") == [1]
    with DemoHub(tokens=tokens, port=feed.port) as feed:
        feed.begin(run)
        feed.step(run, 1)
        feed.step(run, 2)
        page.wait_for_function("() => tracer.state === 'connected'")
        page.wait_for_function(IS_HERE, arg=2)
        page.wait_for_function("() => tracer.step === 2")
        browser.close_pages()
    # The browser itself complains of each try that finds nobody.
    assert all("ERR_CONNECTION_REFUSED" in text for text in browser.complaints)


def test_a_lost_job_drops_and_missing_ranks_are_said(browser, feed):
    run = DemoRun()
    feed.begin(run)
    feed.publish(run.table(1))
    for frame in run.frames(1):
        lacking = {name: getattr(frame, name) for name in ("where", "payload", "table", "num_features")}
        feed.publish(Frame(**lacking, missing=(3,), dropped=17))
    page = opened(browser, feed)
    said = " ".join(page.evaluate("() => tracer.said.notices"))
    assert "Rank 3 missing in train at step 1" in said
    assert "17 frames dropped by ranks in train at step 1" in said
    assert "ranks 3 missing, 17 frames dropped" in page.locator(".pane-title").first.text_content()
    feed.send({"type": "stats", "sent": 5, "dropped": 2, "queued": 0})
    page.wait_for_function("() => tracer.said.notices.some(text => text.startsWith('2 frames dropped on the way'))")
    feed.send({"type": "run", "run": run.run, "state": "lost", "text": "its driver went without a word"})
    page.wait_for_function("() => tracer.said.notices.some(text => text.includes('The job was lost: its driver'))")
    assert page.evaluate("() => tracer.said.connection") == "job lost, you control"
    feed.send({"type": "run", "run": run.run, "state": "recorded", "text": "completed"})
    page.wait_for_function("() => tracer.said.notices.includes('A recording: completed.')")
    page.keyboard.press("7")
    browser.settle(page)
    assert "queries and keys are one fused product" in page.locator("main").text_content()


def test_two_runs_stand_side_by_side(browser, feed, tmp_path):
    runs = [DemoRun(), DemoRun(name="other seed", run="run-b", seed=1)]
    for run in runs:
        feed.begin(run)
        for step in (1, 2):
            feed.step(run, step)
    page = opened(browser, feed, steps=2)
    page.get_by_label("Compare with").select_option("run-b")
    page.wait_for_function("() => tracer.csv().includes('run-b')")
    sent = [next(found for found in run.frames(2) if "rms" in str(found.where.reducer)).payload[0, 0] for run in runs]
    rows = [row for row in shown_numbers(page) if row["site"] == "layer.out[0]" and row["position"] == "0"]
    assert [(row["run"], float(row["value"])) for row in rows] == [("run-a", sent[0]), ("run-b", sent[1])]
    page.get_by_label("A \N{MINUS SIGN} B").check()
    browser.settle(page)
    [row] = [row for row in shown_numbers(page) if row["site"] == "layer.out[0]" and row["position"] == "0"]
    assert float(row["value"]) == float(sent[0]) - float(sent[1])
    for view in range(1, 8):
        page.keyboard.press(str(view))
        browser.settle(page)
        page.screenshot(path=str(tmp_path / f"two_runs_{view}.png"))
        assert view == 7 or {row["run"] for row in shown_numbers(page)} >= {"run-a", "run-b"} or view == 1


def test_pictures_can_be_taken_along(browser, feed):
    run = DemoRun(bad_step=1)
    feed.begin(run)
    feed.step(run, 1)
    page = opened(browser, feed)
    for view in ("tokens", "steps", "experts", "histogram", "next", "metrics", "health"):
        page.evaluate("view => tracer.show(view)", view)
        browser.settle(page)
        with page.expect_download() as download:
            page.keyboard.press("p")
        content = Path(download.value.path()).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 2000, view


def test_hostile_texts_stay_texts(browser, feed):
    run = DemoRun(name=HOSTILE, run="r" + HOSTILE, rows=(HOSTILE + " =1+1\n\u202eevil",))
    feed.begin(run)
    feed.call(lambda: feed.hub.set_run({"run": run.run, "unobserved": {HOSTILE: HOSTILE}, "text": HOSTILE}))
    feed.step(run, 1)
    feed.send({"type": "metrics", "run": run.run, "step": 1, "metrics": {HOSTILE: 1.0}})
    page = opened(browser, feed)
    feed.send({"type": "mark", "label": HOSTILE, "step": 1})
    feed.send({"type": "problem", "text": HOSTILE})
    page.wait_for_function("() => tracer.said.notices.length === 1")
    for view in range(1, 8):
        page.keyboard.press(str(view))
        browser.settle(page)
    assert page.locator("main").text_content().count(HOSTILE) == 4
    assert HOSTILE in page.locator(".notice").text_content()
    page.keyboard.press("1")
    page.keyboard.press("w")
    browser.settle(page)
    assert page.locator("img").count() == 0
    assert page.title() == f"1 · {HOSTILE}"
    texts = [row["token"] for row in shown_numbers(page)]
    assert "·=1+1" in texts
    assert "\ufffdevil" in texts


def test_the_controller_changes_what_is_watched(browser, feed):
    run = DemoRun()
    feed.begin(run)
    feed.step(run, 1)
    page = opened(browser, feed)
    assert page.evaluate("() => tracer.role") == "controller"
    page.keyboard.press("w")
    page.get_by_role("button", name="Histograms, every 5 steps").click()
    browser.settle(page)  # the list is drawn with the new line
    last = page.locator(".watches textarea").last
    last.fill("layer.uot | stats")
    page.get_by_role("button", name="Apply").click()
    page.wait_for_selector(".watches .error:not([hidden])")
    assert "layer.uot" in page.locator(".watches li").last.locator(".error").text_content()
    last.fill("layer.out | stats | every 7")
    page.get_by_role("button", name="Apply").click()
    page.wait_for_function("() => tracer.plan.watches.at(-1) === 'layer.out | stats | every 7'")
    assert feed.call(lambda: feed.hub.plan.texts[-1]) == "layer.out | stats | every 7"
    page.wait_for_function("() => document.querySelector('.panel .key').textContent.includes('not in effect yet')")
    feed.call(lambda: feed.hub.applied(9, feed.hub.plan.digest))
    page.wait_for_function("() => document.querySelector('.panel .key').textContent.includes('in effect from step 9')")
    page.get_by_label("Label of the mark").fill("look here")
    page.get_by_role("button", name="Mark", exact=True).click()
    page.evaluate("() => tracer.show('health')")
    page.wait_for_function("() => document.querySelector('main').textContent.includes('look here')")


def test_tokens_roles_and_taking_over(browser, feed):
    run = DemoRun()
    feed.begin(run)
    feed.step(run, 1)
    first = opened(browser, feed)
    assert "token" not in first.url
    second = opened(browser, feed)
    assert (first.evaluate("() => tracer.role"), second.evaluate("() => tracer.role")) == ("controller", "viewer")
    second.get_by_role("button", name="Take over").click()
    second.wait_for_function("() => tracer.role === 'controller'")
    first.wait_for_function("() => tracer.role === 'viewer' && tracer.said.notices.join().includes('taken over')")
    third = browser.page()
    third.goto(feed.address)
    third.get_by_label("Token of the viewer").fill("wrong")
    third.get_by_role("button", name="Connect").click()
    third.wait_for_function("() => document.querySelector('dialog.token .error').textContent.includes('refuses')")
    third.get_by_label("Token of the viewer").fill(feed.tokens.viewer)
    third.get_by_role("button", name="Connect").click()
    third.wait_for_function("() => tracer.state === 'connected' && tracer.role === 'viewer'")
    third.reload()
    third.wait_for_function("() => window.tracer?.state === 'connected'")


def test_messages_that_are_no_frames_are_refused(browser, feed):
    run = DemoRun()
    feed.begin(run)
    feed.step(run, 1)
    page = opened(browser, feed)
    whole = next(run.frames(1)).encode()
    broken = [b"", b"NRT1", b"NRT2" + whole[4:], whole[:-1], whole[:4] + b"\xff\xff\xff\x7f" + whole[8:],
              whole.replace(b'"float64"', b'"float16"'), whole[:8] + b"x" + whole[9:]]  # fmt: skip
    asked = """async messages => {
        const { decode } = await import('/frame.js');
        const tell = bytes => {
            try { decode(new Uint8Array(bytes).buffer); return 'read'; } catch (error) { return String(error); }
        };
        return messages.map(tell);
    }"""
    found = page.evaluate(asked, [list(message) for message in [whole, *broken]])
    assert found[0] == "read"
    assert all("Error: " in text for text in found[1:]), found


def test_nothing_watched_yet_is_said_with_the_watch_that_helps(browser, feed):
    page = browser.page()
    page.goto(feed.url())
    page.wait_for_function("() => window.tracer?.state === 'connected'")
    assert "Waiting for a run" in page.locator("main").text_content()
    feed.begin(DemoRun())
    page.wait_for_function(
        "() => document.querySelector('main').textContent.includes('Nothing is watched token by token')"
    )
    page.get_by_role("button", name="Add it to the watches").click()
    assert page.locator(".watches textarea").last.input_value() == "layer.out | tiles(1, rms) | train"


def test_every_view_fits_the_screen_in_dark_and_light(browser, feed, tmp_path):
    run = DemoRun()
    feed.begin(run)
    for step in (1, 2):
        feed.step(run, step)
    page = opened(browser, feed, steps=2, width=390, color_scheme="dark", device_scale_factor=2)
    ratio = page.evaluate(
        "() => { const { width, clientWidth } = document.querySelector('canvas'); return width / clientWidth }"
    )
    assert ratio == pytest.approx(2, abs=0.02)
    for scheme, width in (("dark", 390), ("light", 1280)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_function("scheme => document.documentElement.dataset.theme === scheme", arg=scheme)
        for view in ("tokens", "steps", "experts", "histogram", "next", "metrics", "health"):
            page.evaluate("view => tracer.show(view)", view)
            browser.settle(page)
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width, view
            page.screenshot(path=str(tmp_path / f"{view}_{scheme}_{width}.png"), scale="css")


def test_a_table_without_texts_and_frames_that_differ_from_it(browser, feed):
    site = FrameSite(SiteKind.LAYER_OUT, layer=0)
    tokens = np.array([[1, 0, 1], [4, 0, 2], [9, 8, 7]], dtype=np.int32)
    feed.publish(
        FrameTable(run="x", name="t", step=5, keys=("b", "a"), tokens=tokens),
        Frame(where=Where("x", 5, "forward", site, parse_reducer("sample(3)")), table="t", num_features=2,
              payload=np.array([[4, 5], [0, 1], [2, np.inf]], dtype=np.float32)),
    )  # fmt: skip
    page = opened(browser, feed)
    page.get_by_label("Sample").select_option("a")
    browser.settle(page)
    rows = shown_numbers(page)
    assert [(row["position"], row["token"], row["value"]) for row in rows] == [
        ("2", "#7", "2"), ("2", "#7", "Infinity"), ("4", "#9", "4"), ("4", "#9", "5"),
    ]  # fmt: skip
    page.get_by_label("Shown of each token").select_option("number 1")
    browser.settle(page)
    assert [row["value"] for row in shown_numbers(page)] == ["Infinity", "5"]
