"""`tag`: HTML and SVG elements as text; whatever is not made here is escaped.

Example:
    >>> str(tag("td", "a < b", {"class": "n"}, tag("b", "x")))
    '<td class="n">a &lt; b<b>x</b></td>'
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

__all__ = ["Markup", "tag"]

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


def _escaped(value: object) -> str:
    # Half a surrogate pair, which JSON can hold, is no UTF-8.
    return escape(str(value).encode("utf-8", "backslashreplace").decode())
