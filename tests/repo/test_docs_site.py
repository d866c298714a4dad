"""The site of `make docs`: it builds without a warning, loads nothing from elsewhere, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.docs_site import adapted, problems, settings_page

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT_S = 300
ADDRESS = "https://host.example/owner/name/blob/main"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    # With an address, as a site of a forge is built; without one links become paths, which a test below has.
    environment = {**os.environ, "DOCS_REPOSITORY": "https://github.com/owner/name", "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
    )
    # The build ends with `problems`, whose findings are warnings.
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    pages = {path.name for path in (ROOT / "docs").rglob("*.md")} | {"settings.md"}
    assert {path.stem for path in (tmp_path / "site").rglob("*.html")} - {"404"} == {Path(name).stem for name in pages}
    shown = (tmp_path / "site/reference/parts.html").read_text(encoding="utf-8")
    for name in re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/reference/parts.md").read_text(encoding="utf-8"), re.M):
        assert f'id="{name}"' in shown, name
    assert 'id="grpo"' in (tmp_path / "site/reference/settings.html").read_text(encoding="utf-8")


def test_problems_of_a_site_are_named(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text('<h1 id="top">b</h1><a href="../a.html#there">a</a><a href="#top">b</a>')
    (tmp_path / "a.html").write_text(
        '<link rel="canonical" href="https://a.example"><link rel="stylesheet" href="site.css"><h2 id="there">a</h2>'
        '<a href="sub/b.html#top">b</a><a href="sub/b.html#low">b</a><a href="c.html">c</a><a href="https://a.example">x</a>'
        '<script src="https://cdn.example/a.js"></script><img src="a.png" srcset="//cdn.example/b.png 2x">'
        '<style>@import "https://fonts.example/f";</style><p style="background: url(data:image/png;base64,AA)">p</p>'
    )
    (tmp_path / "site.css").write_text('@font-face { src: url("https://fonts.example/f.woff2") } a { color: red }')
    (tmp_path / "404.html").write_text(
        '<a href="/a.html#there">b</a><a href="/d.html" data-md-component="source">d</a>'
    )
    assert problems(tmp_path) == [
        "404.html: asks a forge for stars",
        "a.html: loads https://cdn.example/a.js from another host",
        "a.html: loads a.png, which does not exist",
        "a.html: loads //cdn.example/b.png from another host",
        "a.html: loads https://fonts.example/f from another host",
        "site.css: loads https://fonts.example/f.woff2 from another host",
        "404.html: /d.html does not exist",
        "a.html: sub/b.html#low has no such anchor",
        "a.html: c.html does not exist",
    ]


@pytest.mark.parametrize(
    ("page", "text", "with_address", "without"),
    [
        ("guide.md", "[rules](../Makefile)", f"[rules]({ADDRESS}/Makefile)", "rules (`Makefile`)"),
        ("guide.md", "[x.yaml](../configs/x.yaml)", f"[x.yaml]({ADDRESS}/configs/x.yaml)", "`configs/x.yaml`"),
        ("guide.md", "[`f`](../nemo_rl/a.py)", f"[`f`]({ADDRESS}/nemo_rl/a.py)", "`f` (`nemo_rl/a.py`)"),
        ("reference/a.md", "[x](../../LICENSE#y)", f"[x]({ADDRESS}/LICENSE)", "x (`LICENSE`)"),
        ("guide.md", "[keys](../configs/grpo_base.yaml)", *["[keys](reference/settings.md)"] * 2),
        ("reference/a.md", "[keys](../../configs/grpo_base.yaml)", *["[keys](settings.md)"] * 2),
        *((page, text, text, text) for page, text in [("a.md", "[b](b.md#c)"), ("reference/a.md", "[b](../b.md)")]),
        *(("a.md", text, text, text) for text in ["[b](#c)", "[b](https://b.example)", "![b](images/b.png)"]),
        # Links inside a block are none; words after its language are for the walk of the docs.
        ("a.md", "```text cheap\n[b](../b)\n```\n", *["```text\n[b](../b)\n```\n"] * 2),
    ],
)
def test_links_that_leave_docs_lead_to_the_repository(page: str, text: str, with_address: str, without: str) -> None:
    assert adapted(text, page, ADDRESS) == with_address
    assert adapted(text, page, "") == without


def test_a_picture_in_two_schemes_follows_the_palette() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    alt = "Processes of a run and what flows between them"
    light, dark = (f'![{alt}](images/processes_{name}.svg#only-{name}){{ width="920" }}' for name in ("light", "dark"))
    assert f"{light}\n{dark}" in adapted(text, "architecture.md", "") and "<picture>" not in adapted(text, "a.md", "")


def test_the_page_of_settings_has_every_key() -> None:
    recipe = (ROOT / "configs/grpo_base.yaml").read_text(encoding="utf-8")
    page = settings_page(recipe)
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == len(re.findall(r"^## [a-z_]+\n\n\S", page, re.MULTILINE)) >= 8
    assert all(len(line) <= 80 for block in blocks for line in block.splitlines() if line.lstrip().startswith("# "))
    # Comments are only broken elsewhere, keys not at all.
    whole = [
        re.findall(r"[^\s#]+", re.sub(r"^# .*", "", text, flags=re.MULTILINE)) for text in (recipe, "".join(blocks))
    ]
    assert whole[0] == whole[1]
    keys = [[line for line in text.splitlines() if re.match(r" *[a-z_]+:", line)] for text in (recipe, "".join(blocks))]
    assert keys[0] == keys[1]
