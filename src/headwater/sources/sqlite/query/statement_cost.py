"""Estimate of how long the program of a statement may run without a check of the clock, by the length of its values.

SQLite checks the clock only where a program jumps back, so thousands of calls in one row run without a check. The
opcodes are counted in the program, not in the text: SQLite copies expressions of subqueries to each of their uses.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from typing import Any

import msgspec

# Nanoseconds per byte of a value, measured.
_FUNCTION = 4
_JSON_ARGUMENT = 4
_PATTERN = 50  # for a pattern of 16 bytes, the maximum for long texts
_OPERATORS = {
    **dict.fromkeys(("Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Compare", "Concat", "Cast"), 1),
    **dict.fromkeys(("Add", "Subtract", "Multiply", "Divide", "Remainder", "BitAnd", "BitOr"), 1),
}
_CALLS = frozenset({"Function", "PureFunc", "AggStep", "AggStep1", "AggInverse", "AggFinal", "AggValue"})
_JSON = "insert set replace remove extract array_insert patch"
# The cost of these functions is the number of arguments times the length of the first argument.
BY_ARGUMENTS = frozenset(f"{kind}_{name}" for kind in ("json", "jsonb") for name in _JSON.split()) | {
    "->",
    "->>",
    *["json", "jsonb", "json_array_length", "json_pretty", "json_type", "json_valid", "json_error_position"],
}
_COMPARING = frozenset({"max", "min"})
BUDGET = 3_000_000_000  # nanoseconds without a check
MOST_WEIGHT = 10_000_000  # weight at which counting stops
PLAIN = 500  # characters
_TOKEN = re.compile(
    r"""(?P<skip>'[^']*+(?:''[^']*+)*+'|`[^`]*`|\[[^\]]*+(?:\]|\Z)|--[^\n]*|/\*.*?(?:\*/|\Z))"""
    r"""|(?P<name>[A-Za-z_]\w*|"[^"]*+(?:""[^"]*+)*+")|(?P<mark>[(),])""",
    re.DOTALL,
)


class Cost(msgspec.Struct, frozen=True):
    """Estimated cost of one run through a statement's program."""

    weight: int = 0  # nanoseconds per byte of its values, if every opcode runs once
    slow_calls: int = 0  # calls of functions whose cost is the product of two lengths
    arguments: int = 2  # maximum number of arguments of a function whose cost grows with them

    @property
    def length(self) -> int:
        """Return the maximum length in bytes of values with which one run of the program stays within BUDGET."""
        return BUDGET // max(self.weight, 1)


def is_plain(sql: str) -> bool:
    """Return whether a statement without function calls is too short to cost much: its program need not be read.

    In a subquery a short statement may grow: SQLite copies the expressions.
    """
    return len(sql) <= PLAIN and sql.lower().count("select") <= 1


def cost_of(sql: str, program: Iterable[tuple[Any, ...]], slow: Container[str]) -> Cost:
    """Return the cost of a statement whose opcodes, as EXPLAIN lists them, are `program`; count its calls of `slow`.

    The programs of triggers follow the main program and are left out: only owners create triggers.
    """
    arguments = _arguments(sql)
    weight = calls = 0
    last = -1
    for address, opcode, *_, called, _, _ in _readable(iter(program)):
        if address <= last or weight > MOST_WEIGHT:
            break
        last = address
        if opcode in _CALLS:
            name = str(called).rpartition("(")[0]
            calls += name in slow
            weight += call_weight(name, arguments.get(name, 2))
        else:
            weight += _OPERATORS.get(opcode, 0)
    most = max((count for name, count in arguments.items() if name in BY_ARGUMENTS), default=2)
    return Cost(weight, calls, max(most, 2))


def _readable(program: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield the opcodes without those of blobs that are not UTF-8: EXPLAIN shows blobs as text."""
    while True:
        try:
            yield next(program)
        except UnicodeDecodeError:
            continue
        except StopIteration:
            return


def call_weight(name: str, arguments: int) -> int:
    """Return the nanoseconds per byte of a call."""
    if name in BY_ARGUMENTS:
        return _FUNCTION + _JSON_ARGUMENT * arguments
    if name in _COMPARING:
        return _FUNCTION + arguments
    return _PATTERN if name in ("like", "glob") else _FUNCTION


def _arguments(sql: str) -> dict[str, int]:
    """Return, for each function called in the SQL text, the most arguments that any one call passes."""
    found: dict[str, int] = {}
    open_calls: list[list[Any]] = []
    name = ""
    for token in _TOKEN.finditer(sql):
        mark = token["mark"]
        if mark == "(":
            open_calls.append([name, 1])
        elif mark == "," and open_calls:
            open_calls[-1][1] += 1
        elif mark == ")" and open_calls:
            called, count = open_calls.pop()
            found[called] = max(found.get(called, 0), count)
        if token["skip"] is None or not token["skip"].startswith(("--", "/*")):
            name = (token["name"] or token["skip"] or "").strip("\"'`[]").lower()
    return found
