"""Arguments of requests to the ledger, checked for their kind: text, numbers, lists and records.

Used by `ledger`. A request of another kind is an error of its client, told as an assertion that names the argument.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["form", "number", "records", "seconds", "text", "texts"]


def form(record: Mapping[str, object]) -> dict[str, bytes]:
    form = record.get("form", {})
    assert isinstance(form, dict), f"form: expected a dict, got {form!r}"
    return form


def text(args: Mapping[str, object], name: str) -> str:
    value = args[name]
    assert isinstance(value, str), f"{name}: expected a string, got {value!r}"
    return value


def number(args: Mapping[str, object], name: str) -> int:
    value = args[name]
    assert isinstance(value, int), f"{name}: expected an integer, got {value!r}"
    return value


def seconds(args: Mapping[str, object], name: str) -> float:
    value = args.get(name, 0.0)
    assert isinstance(value, int | float), f"{name}: expected seconds, got {value!r}"
    return float(value)


def texts(args: Mapping[str, object], name: str) -> list[str]:
    value = args[name]
    assert isinstance(value, list), f"{name}: expected a list, got {value!r}"
    return value


def records(args: Mapping[str, object], name: str) -> list[dict[str, object]]:
    value = args[name]
    assert isinstance(value, list), f"{name}: expected a list, got {value!r}"
    return value
