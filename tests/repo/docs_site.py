"""The site of `make docs`: what its pages are made of, and the check of what was built.

    make docs                                             # into build/docs
    make docs DOCS_REPOSITORY=https://host/owner/name     # links to files outside of docs lead there

mkdocs calls the functions whose names begin with `on_` (mkdocs.yml names this file). Pages are written for a forge:
there a link may lead to any file of the repository, and a fenced block may carry words after its language. Here such a
link leads to the repository's address, or becomes the path of the file where none is given; a link to the base recipe
leads to the page of every setting. The pages themselves stay as they are.
"""

from __future__ import annotations

import itertools
import logging
import posixpath
import re
import textwrap
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = [
    "BLOCK",
    "LINK",
    "adapted",
    "on_files",
    "on_page_markdown",
    "on_post_build",
    "on_post_page",
    "on_post_template",
    "problems",
    "settings_page",
]

# mkdocs counts the warnings of this logger, and `--strict` fails by them.
logger = logging.getLogger("mkdocs.plugins.docs_site")

ROOT = Path(__file__).parents[2]
BASE_RECIPE, SETTINGS = "configs/grpo_base.yaml", "reference/settings.md"

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]*)" src="([^"]+)" width="(\d+)">\s*</picture>'
)
"""A picture in two colour schemes, as a forge shows it; the site shows the one of the palette that is chosen."""
NAME, PARTS, BREAK = re.compile(r"<code>([^<\n]+)</code>"), re.compile(r"([._/=])(?=\w)"), r"\1<wbr>"
"""Code within a line; where it may be broken."""
ASKS_A_FORGE = ' data-md-component="source"'
COMMENT = re.compile(r"( *)(# )?")
WIDTH = 80
"""Columns of the settings, so that a page shows whole lines."""
SECTION = re.compile(r"^# ([^\n]+(?:\n# [^\n]+)*)\n([a-z_]+:[^\n]*)$", re.MULTILINE)
"""What a section is, which may take several lines, and its name; of a key without a section also its value."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of every setting, which is made from the base recipe."""
    from mkdocs.structure.files import File

    recipe = (ROOT / BASE_RECIPE).read_text(encoding="utf-8")
    files.append(File.generated(config, SETTINGS, content=settings_page(recipe)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page in the form that mkdocs reads."""
    del files
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    address = f"{config.repo_url.rstrip('/')}/blob/{config.extra['revision']}" if config.repo_url else ""
    return adapted(markdown, page.file.src_uri, address)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Return the page with places to break long names."""
    del page
    shown = NAME.sub(lambda match: f"<code>{PARTS.sub(BREAK, match[1])}</code>", output)
    return on_post_template(shown, "", config)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Return a page, or that of a wrong address, without the mark by which the theme asks a forge for stars."""
    del template_name, config
    return output_content.replace(ASKS_A_FORGE, "")


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of each problem of the built site."""
    for problem in problems(Path(config.site_dir)):
        logger.warning(problem)


def settings_page(recipe: str) -> str:
    """Return the base recipe as a page with one heading for each of its sections."""
    head, *parts = SECTION.split(recipe)
    shown = []
    for what, line, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        text, block = what.replace("\n# ", " "), f"{line}\n{_narrow(body)}".strip()
        shown.append(f"## {line.partition(':')[0]}\n\n{text}\n\n```yaml\n{block}\n```\n")
    lines = " ".join(line.lstrip("# ") for line in head.splitlines()[1:])
    return "\n".join(["# Every setting\n", f"The keys of a recipe with their defaults. {lines}\n", *shown])


def _narrow(body: str) -> str:
    """The lines of a section with its comments broken to the width of the page."""
    lines: list[str] = []
    for start, group in itertools.groupby(body.strip("\n").splitlines(), key=lambda line: COMMENT.match(line)[0]):
        if start.endswith("# "):
            words = " ".join(line.removeprefix(start) for line in group)
            lines += textwrap.wrap(words, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)
        else:
            lines += group
    return "\n".join(lines)


def adapted(text: str, page: str, address: str) -> str:
    """Return the text of a page in the form that mkdocs reads.

    Args:
        page: its path in docs, such as `reference/index.md`.
        address: what the path of a file is appended to; empty where the repository has no known address.
    """
    parts, end = [], 0
    for block in BLOCK.finditer(text):
        parts += [_prose(text[end : block.start()], page, address), f"```{block[1]}\n{block[2]}```"]
        end = block.end()
    return "".join([*parts, _prose(text[end:], page, address)])


def _prose(text: str, page: str, address: str) -> str:
    def linked(match: re.Match[str]) -> str:
        words, target = match.groups()
        path = _path_outside(page, target)
        if path is None:
            return match[0]
        if path == BASE_RECIPE:
            return f"[{words}]({posixpath.relpath(SETTINGS, posixpath.dirname(page) or '.')})"
        if address:
            return f"[{words}]({address}/{path})"
        is_its_name = words.strip("`") in (Path(path).stem, Path(path).name) or path.endswith(f"/{words.strip('`')}")
        return f"`{path}`" if is_its_name or words == path else f"{words} (`{path}`)"

    def drawn(match: re.Match[str]) -> str:
        dark, alt, light, width = match.groups()
        images = ((light, "light"), (dark, "dark"))
        return "\n".join(f'![{alt}]({file}#only-{scheme}){{ width="{width}" }}' for file, scheme in images)

    return PICTURE.sub(drawn, LINK.sub(linked, text))


def _path_outside(page: str, target: str) -> str | None:
    """The file outside of docs that a link leads to, by its path in the repository."""
    if "://" in target or target.startswith("#"):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.partition("#")[0]))
    return None if path.startswith("docs/") else path


LOADED = {"script", "img", "source", "iframe", "embed", "video", "audio", "track"}
"""Tags whose `src` a browser loads when it shows the page."""
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch", "manifest"}
IN_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?([^"')\s;]+)""")


class _Anchors(HTMLParser):
    """The addresses of a page: what it loads, where its links lead, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = {""}
        self._is_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        self.loads += [given["src"]] if tag in LOADED and "src" in given else []
        self.loads += [candidate.split()[0] for candidate in given.get("srcset", "").split(",") if candidate.strip()]
        self.loads += IN_STYLE.findall(given.get("style", ""))
        self._is_style = tag == "style"
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and LOADED_LINKS & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))

    def handle_data(self, data: str) -> None:
        if self._is_style:
            self.loads += IN_STYLE.findall(data)
            self._is_style = False


def problems(site: Path) -> list[str]:
    """Return the problems of a built site: what pages and styles load from elsewhere, and links that lead nowhere."""
    site, pages = site.resolve(), dict[Path, _Anchors]()
    found: list[str] = []
    for path in sorted(site.rglob("*.html")):
        text, pages[path] = path.read_text(encoding="utf-8"), _Anchors()
        pages[path].feed(text)
        found += [f"{path.relative_to(site)}: asks a forge for stars"] if ASKS_A_FORGE in text else []
    styles = {path: IN_STYLE.findall(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.css"))}
    loads = {path: page.loads for path, page in pages.items()} | styles
    found += [f"{path.relative_to(site)}: {text}" for path in loads for text in _bad_loads(site, path, loads[path])]
    return found + [f"{path.relative_to(site)}: {text}" for path in pages for text in _bad_links(site, path, pages)]


def _target(site: Path, path: Path, address: str) -> Path:
    """The file at an address of a page; the page of a wrong address stands anywhere, and gives those from the root."""
    return (site / address.lstrip("/") if address.startswith("/") else path.parent / address).resolve()


def _bad_loads(site: Path, path: Path, addresses: list[str]) -> Iterator[str]:
    for address in dict.fromkeys(addresses):
        where = urlsplit(address)
        if where.scheme in ("http", "https") or where.netloc:
            yield f"loads {address} from another host"
        elif not where.scheme and where.path and not _target(site, path, unquote(where.path)).exists():
            yield f"loads {address}, which does not exist"


def _bad_links(site: Path, path: Path, pages: Mapping[Path, _Anchors]) -> Iterator[str]:
    for address in dict.fromkeys(pages[path].links):
        where = urlsplit(address)
        if where.scheme or where.netloc:
            continue
        target = _target(site, path, unquote(where.path)) if where.path else path
        if not target.exists():
            yield f"{address} does not exist"
        elif target in pages and unquote(where.fragment) not in pages[target].ids:
            yield f"{address} has no such anchor"
