"""The JSON schema of a tool from its signature, and the check of arguments against it.

Standard library only: the processes of tools make schemas, their host checks arguments before a call.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Union, cast

__all__ = ["argument_problems", "options_problem", "schema_of"]

_PLAIN: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
    Mapping: "object",
    Sequence: "array",
    type(None): "null",
}
_PYTHON: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}
_VALUE_SHOWN = 80
"""Characters of a wrong value that a message shows."""
_FIRST_END = re.compile(r"\n\s*\n|\n(?=\s*[:@]\w)")
"""Ends the first paragraph of a docstring."""
_HEADS = ("Args:", "Arguments:", "Parameters:")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_NUMPY = re.compile(r"(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?()$")
_FIELD = re.compile(r"[:@]param(?:eter)?\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a tool in the form that chat templates take.

    Parameters are those before `*`; what stands after it are options of the recipe, which the model does not see. The
    first paragraph of the docstring describes the tool, its section about parameters, in the style of Google, NumPy or
    Sphinx, the parameters.

    Raises:
        TypeError: the signature has a type without a JSON form, or parameters that cannot be given by name.

    Example:
        >>> def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.'''
        >>> schema_of(add)["function"]["parameters"]["required"]
        ['a']
    """
    description, told = _docstring(inspect.getdoc(function) or "")
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise TypeError(f"parameter {name!r}: expected one that can be given by its name; name every parameter")
        form = _form(hints.get(name, Any), where=f"parameter {name!r}")
        if name in told:
            form["description"] = told[name]
        if parameter.default is parameter.empty:
            required.append(name)
        else:
            form["default"] = parameter.default
        properties[name] = form
    parameters = {"type": "object", "properties": properties, "required": required}
    json.dumps(parameters)  # a default without a JSON form
    shown = {"name": function.__name__, "description": description, "parameters": parameters}
    return {"type": "function", "function": shown}


def options_problem(function: Callable[..., Any], options: Mapping[str, object]) -> str | None:
    """Return why the function cannot take these options by keyword-only parameters; None when it can."""
    own = {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    if unknown := sorted(set(options) - set(own)):
        return f"options: expected {', '.join(own) or 'none'}, got {', '.join(unknown)}"
    missing = [name for name, p in own.items() if p.default is p.empty and name not in options]
    return f"options: {', '.join(missing)} must be set" if missing else None


def argument_problems(schema: Mapping[str, Any], arguments: Mapping[str, object]) -> list[str]:
    """Return why the arguments do not fit the schema of a tool, a line each; none when they do.

    Example:
        >>> form = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        >>> argument_problems({"function": {"parameters": form}}, {"a": "x"})
        ["a: expected integer, got 'x'"]
    """
    form = cast("Mapping[str, Any]", schema["function"]["parameters"])
    properties = cast("Mapping[str, Any]", form["properties"])
    problems = [
        f"{name}: missing, expected {_said(properties[name])}" for name in form["required"] if name not in arguments
    ]
    for name, value in arguments.items():
        if name not in properties:
            problems.append(f"{name[:_VALUE_SHOWN]}: no such parameter, expected {', '.join(properties) or 'none'}")
        elif not _fits(value, properties[name]):
            problems.append(f"{name}: expected {_said(properties[name])}, got {repr(value)[:_VALUE_SHOWN]}")
    return problems


def _form(hint: Any, *, where: str) -> dict[str, Any]:
    if hint is Any or hint is object:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        names = {_PLAIN.get(type(value)) for value in inner}
        only = names.pop() if len(names) == 1 else None
        return {**({"type": only} if only else {}), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_form(one, where=where) for one in inner]}
    if origin in (list, Sequence) or _is_from_abc(origin, "Sequence"):
        return {"type": "array", "items": _form(inner[0], where=where)}
    if origin in (dict, Mapping) or _is_from_abc(origin, "Mapping"):
        return {"type": "object", "additionalProperties": _form(inner[1], where=where)}
    raise TypeError(
        f"{where}: expected str, int, float, bool, list, dict, Literal or a union of them, got {hint!r}; "
        "tools take JSON"
    )


def _is_from_abc(origin: Any, name: str) -> bool:
    return inspect.isclass(origin) and origin.__module__ == "collections.abc" and origin.__name__ == name


def _fits(value: object, form: Mapping[str, Any]) -> bool:
    if "anyOf" in form:
        return any(_fits(value, one) for one in form["anyOf"])
    if "enum" in form:
        return any(value == one and type(value) is type(one) for one in form["enum"])
    kind = form.get("type")
    if kind is None:
        return True
    if isinstance(value, bool) and kind != "boolean":
        return False
    if not isinstance(value, _PYTHON[kind]):
        return False
    if kind == "array" and "items" in form:
        return all(_fits(item, form["items"]) for item in cast("list[object]", value))
    if kind == "object" and "additionalProperties" in form:
        return all(_fits(item, form["additionalProperties"]) for item in cast("dict[str, object]", value).values())
    return True


def _said(form: Mapping[str, Any]) -> str:
    if "anyOf" in form:
        return " or ".join(_said(one) for one in form["anyOf"])
    if "enum" in form:
        return "one of " + ", ".join(map(repr, form["enum"]))
    kind = str(form.get("type", "any value"))
    return f"{kind} of {_said(form['items'])}" if kind == "array" and form.get("items") else kind


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph, and the descriptions of parameters by name: of a section `Args:` (Google), of one
    `Parameters` underlined (NumPy), or of fields `:param name:` (Sphinx)."""
    first = " ".join(_FIRST_END.split(text, maxsplit=1)[0].split())
    told: dict[str, str] = {}
    style, names, indent = "", list[str](), 0
    for line, following in pairwise([*text.splitlines(), ""]):
        said, depth = line.strip(), len(line) - len(line.lstrip())
        match = None
        if not said or set(said) == {"-"}:
            continue
        if field := _FIELD.match(said):
            style, match, indent = "fields", field, depth
        elif depth == 0 and set(following.strip()) == {"-"}:
            style, names = "numpy" if said.endswith("Parameters") else "", []
            continue
        elif depth == 0 and style != "numpy":
            style, names, indent = "google" if said in _HEADS else "", [], 0
            continue
        elif style == "google":
            indent = indent or depth
            match = _ARGUMENT.match(said) if depth == indent else None
        elif style == "numpy" and depth == 0:
            match = _NUMPY.match(said)
            names = []
        elif style == "fields" and depth <= indent:
            style, names = "", []
        if match:
            names = match[1].replace(" ", "").split(",")
            told |= dict.fromkeys(names, match[2].strip())
        else:
            told |= {name: f"{told[name]} {said}".strip() for name in names}
    return first, told
