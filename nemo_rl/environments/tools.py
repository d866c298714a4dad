"""Built-in tools: `calculator`, `python`, `lookup`. They run in processes of `ToolHost`; standard library only."""

from __future__ import annotations

import ast
import json
import math
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from nemo_rl.utils.files import read_plain_text

__all__ = ["calculator", "lookup", "python"]

_EXPRESSION_LIMIT = 1000
"""Characters of an expression."""
_INTEGER_BITS = 4096
"""Most bits of an integer, about 1,200 digits: larger ones take time and no conversation needs them."""
_OUTPUT_LIMIT_BYTES = 1 << 20
_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR")
"""Environment variables that every program of `python` gets."""
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "gcd": math.gcd,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: in the form of Python, such as 12*(3+4) or sqrt(2)
    """
    if len(expression) > _EXPRESSION_LIMIT:
        raise ValueError(f"expected at most {_EXPRESSION_LIMIT} characters, got {len(expression)}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("expected an arithmetic expression such as 12*(3+4)") from error
    return str(value)


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _bounded(node.value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _bounded(_OPERATORS[type(sign)](_value(operand)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _combined(sign, _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"expected numbers, operators and {', '.join([*_FUNCTIONS, *_CONSTANTS])}")


def _combined(sign: ast.operator, left: int | float, right: int | float) -> int | float:
    if isinstance(sign, ast.Pow) and _power_bits(left, right) > _INTEGER_BITS:
        raise ValueError(f"a power is too large: more than {_INTEGER_BITS} bits")
    return _bounded(_OPERATORS[type(sign)](left, right))


def _power_bits(base: int | float, exponent: int | float) -> float:
    is_large = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    return exponent * math.log2(abs(base)) if is_large else 0.0


def _bounded(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        raise ValueError(f"a number is too large: more than {_INTEGER_BITS} bits")
    if not isinstance(value, (int, float)):
        raise ValueError(f"expected a real number, got {value!r}")
    return value


def python(code: str, *, variables: Sequence[str] = ()) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: the program; print what you want to see
    """
    # A file of its own: a text of 1 MB is no argument of a command, and standard input is empty.
    Path("program.py").write_text(code, encoding="utf-8", errors="surrogatepass")
    command = [sys.executable, "-I", "program.py"]
    # Code that the model wrote sees no other variables: they hold keys.
    known = {name: os.environ[name] for name in (*_VARIABLES, *variables) if name in os.environ}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=known
    ) as process:
        assert process.stdout is not None, "it was asked for a pipe"
        output, num_dropped = bytearray(), 0
        while part := os.read(process.stdout.fileno(), 1 << 16):
            kept = part[: _OUTPUT_LIMIT_BYTES - len(output)]
            output += kept
            num_dropped += len(part) - len(kept)
    text = output.decode("utf-8", "replace")
    if num_dropped:
        text += f"\n... and {num_dropped} more bytes"
    if process.returncode:
        text = f"{text.rstrip()}\nexit code {process.returncode}"
    return text.strip("\n")


vars(python)["runs_code"] = True


def _check_python(*, variables: object = ()) -> None:
    if not isinstance(variables, list | tuple) or not all(isinstance(name, str) for name in variables):
        raise ValueError(f"python: options.variables: expected names of environment variables, got {variables!r}")


vars(python)["check_options"] = _check_python


def lookup(key: str, *, table: Mapping[str, object] | None = None, file: str | None = None) -> object:
    """Look up the entry of a key in the table.

    Args:
        key: the key
    """
    entries = table if table is not None else _table_of(file)
    if key not in entries:
        raise KeyError("no such key")
    return entries[key]


def _check_lookup(*, table: Mapping[str, object] | None = None, file: str | None = None) -> None:
    if table is None:
        _table_of(file)


vars(lookup)["check_options"] = _check_lookup


@cache
def _table_of(file: str | None) -> Mapping[str, object]:
    if file is None:
        raise ValueError("lookup: set options.table to a table, or options.file to a JSON file that holds one")
    entries = json.loads(read_plain_text(Path(file)))
    if not isinstance(entries, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(entries).__name__}")
    return entries
