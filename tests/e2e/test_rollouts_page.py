"""The page of readable rollouts in a headless Chromium: colours, tooltips, both schemes, hostile texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_tools.rollouts.choice import choose_rollouts
from nemo_rl_tools.rollouts.page import write_rollout_page
from tests.helpers.browser import Browser, chromium_path
from tests.helpers.rollout_rows import HOSTILE, earlier_row, token_row, usual_rows, write_rows

pytestmark = [
    pytest.mark.skipif(
        not chromium_path(), reason="no Chromium is installed: chromium, chromium-browser, google-chrome"
    ),
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(chromium_path()) as browser:
        yield browser


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Everything that a page can show, hostile texts in every place."""
    hostile = token_row(HOSTILE, [HOSTILE, "x"], prompt=[HOSTILE], components={HOSTILE: 1.0}, finish_reason=HOSTILE)
    run = write_rows(tmp_path, 3, [*usual_rows(), hostile, earlier_row("old_g0", HOSTILE)])
    return write_rollout_page(tmp_path / "page.html", choose_rollouts(run, step=None, group=None, limit=None))


def opened(browser: Browser, written: Path, **how: Any) -> Any:
    browser.complaints.clear()
    browser.requests.clear()
    page = browser.page(**how)
    page.goto(written.as_uri())
    browser.settle(page)
    return page


def styles(page: Any, name: str, *properties: str) -> tuple[str, ...]:
    return tuple(
        page.locator(name).first.evaluate("(box, how) => getComputedStyle(box)[how]", each) for each in properties
    )


def test_rows_are_found_by_text_reward_answer_and_step(browser: Browser, tmp_path: Path) -> None:
    write_rows(
        tmp_path, 3, [token_row("aa_g0", ["Par", "is"]), token_row("aa_g1", ["Rome"], reward=-0.5, components={})]
    )
    write_rows(tmp_path, 4, [token_row("bb_g0", ["x"], prompt=["capital of Peru"], reward=0.5)])
    shown = choose_rollouts(tmp_path, step=None, group=None, limit=None, every_step=True)
    page = opened(browser, write_rollout_page(tmp_path / "page.html", shown))

    def found(name: str, value: str) -> list[str]:
        box = page.locator(f"[name={name}]")
        box.select_option(value) if name in ("answer", "step") else box.fill(value)
        keys = page.locator("section:not([hidden]) > article:not([hidden]) .key").all_text_contents()
        assert page.locator("output").text_content() == f"{len(keys)} of 3 rows"
        box.select_option("") if name in ("answer", "step") else box.fill("")
        return keys

    assert found("text", "PARIS") == ["aa_g0"] and found("text", "of peru") == ["bb_g0"] and found("text", "?") == []
    assert found("least", "0.5") == ["aa_g0", "bb_g0"] and found("most", "0.5") == ["aa_g1", "bb_g0"]
    assert found("answer", "wrong") == ["aa_g1"] and found("answer", "right") == ["aa_g0", "bb_g0"]
    assert found("step", "4") == ["bb_g0"] and len(found("step", "")) == 3
    assert browser.complaints == []
    browser.close_pages()


@pytest.mark.slow
def test_the_page_looks_right_in_both_schemes_and_runs_nothing(browser: Browser, written: Path, tmp_path: Path) -> None:
    seen, pictures = {}, {}
    for scheme in ("light", "dark"):
        page = opened(browser, written, width=800, height=900, color_scheme=scheme)
        tokens = page.locator("pre.response").first.locator("span")
        assert tokens.all_text_contents() == ["1", " 2", " 3", "<|im_end|>"]
        assert tokens.nth(2).get_attribute("title") == ("token 4 at 4: rollout -0.25, trainer +0.65, difference -0.9")
        assert [tokens.nth(at).get_attribute("class") for at in range(4)] == ["close", "apart", "far", "close"]
        back = styles(page, "body", "backgroundColor")
        seen[scheme] = (
            *back,
            *styles(page, "pre .apart", "backgroundColor"),
            *styles(page, "pre .far", "backgroundColor"),
        )
        assert len(set(seen[scheme])) == 3, "a grade is seen as colour"
        lines = {styles(page, f"pre .{name}", "borderBottomStyle")[0] for name in ("close", "apart", "far")}
        assert len(lines) == 3, "and without colour"
        for untrained in ("pre .masked", "article.out pre"):
            assert styles(page, untrained, "opacity", "textDecorationLine") == ("1", "none"), "it can be read"
        assert styles(page, "pre .masked", "color", "fontStyle") != styles(page, "pre .close", "color", "fontStyle")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "no line is cut"
        assert page.title().startswith("Rollouts of ") and page.locator("img").count() == 0
        picture = tmp_path / f"{scheme}.png"
        page.screenshot(path=str(picture))
        pictures[scheme] = picture.read_bytes()
    assert not set(seen["light"]) & set(seen["dark"])
    assert pictures["light"] != pictures["dark"] and all(len(picture) > 10_000 for picture in pictures.values())
    assert browser.complaints == [] and browser.requests == [written.as_uri()]
    browser.close_pages()
