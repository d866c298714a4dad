"""`tag`: HTML and SVG elements as text; whatever is not made here is escaped. `whole_page`: a page of them.

Example:
    >>> str(tag("td", "a < b", {"class": "n"}, tag("b", "x")))
    '<td class="n">a &lt; b<b>x</b></td>'
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from html import escape
from pathlib import Path

__all__ = ["Markup", "tag", "whole_page"]

BASE = Path(__file__).parent / "view" / "page" / "base.css"
"""Colours and letters of all pages."""

_VOID = frozenset({"meta", "br", "hr", "input"})


class Markup(str):
    """Text that is HTML already: made by `tag` only."""

    __slots__ = ()


def tag(name: str, *parts: object) -> Markup:
    """Return an element.

    Args:
        parts: attributes as mappings, and content: `Markup` as it is, everything else escaped.
    """
    attributes = {key: value for part in parts if isinstance(part, Mapping) for key, value in part.items()}
    opening = "".join(f' {key}="{_escaped(value)}"' for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{opening}>")
    inner = "".join(
        part if isinstance(part, Markup) else _escaped(part) for part in parts if not isinstance(part, Mapping)
    )
    return Markup(f"<{name}{opening}>{inner}</{name}>")


def whole_page(title: str, *body: Markup, style: str, script: str = "") -> str:
    """Return a page that needs nothing else: no font, no picture, no script but its own.

    Its policy names what a browser may load and run: should something get past the escaping, it still can do nothing.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"; script-src 'sha256-{digest}'" if script else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline'{allowed}"
    head = tag(
        "head",
        tag("meta", {"charset": "utf-8"}),
        tag("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        tag("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        tag("title", title),
        tag("style", Markup(BASE.read_text(encoding="utf-8") + style)),
    )
    scripts = [tag("script", Markup(script))] if script else []
    return f"<!DOCTYPE html>\n{tag('html', {'lang': 'en'}, head, tag('body', *body, *scripts))}\n"


def _escaped(value: object) -> str:
    # Half a surrogate pair, which JSON can hold, is no UTF-8.
    return escape(str(value).encode("utf-8", "backslashreplace").decode())
