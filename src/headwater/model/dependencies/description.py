"""Dependencies in words, which explain why an answer became stale."""

from __future__ import annotations

import msgspec

from headwater.model.dependencies.dependency import (
    AllOf,
    Analysis,
    AnyOf,
    Comparison,
    Condition,
    Const,
    Dependency,
    Guard,
    KeyGuard,
    Operand,
    Param,
)
from headwater.model.literal import Date, DateTime, Time, Value

_SIGNS = {"eq": "=", "ne": "<>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "is": "is", "is_not": "is not"}
_SHOWN = 8  # values shown of a list
_LONG = 60  # characters shown of one value


class Reason(msgspec.Struct, frozen=True):
    """The reason why a change is relevant to a query with its arguments."""

    table: str
    columns: list[str] | None  # that differ, or that the query reads of an inserted or deleted row; None: all
    condition: str  # in words


def words(analysis: Analysis) -> list[str]:
    """Return one sentence for each table reference, then sentences about the whole query, then one for each guard."""
    found = [of_dependency(one) for one in analysis.dependencies]
    found += [f"never cached: {reason}" for reason in analysis.volatile]
    found += [f"in doubt: {reason}" for reason in analysis.doubts]
    if not analysis.is_total:
        found.append("rows that tie may come in any order")
    return found + [of_guard(guard, analysis) for guard in analysis.guards]


def of_dependency(dependency: Dependency) -> str:
    """Return a text such as: orders: columns id, total; rows where customer = :p1 and total > 5."""
    if dependency.columns is None:
        columns = "all columns"
    elif not dependency.columns:
        columns = "no column, only which rows there are"
    else:
        columns = "columns " + ", ".join(sorted(dependency.columns))
    text = of_condition(dependency.condition)
    return f"{dependency.table}: {columns}; " + (f"rows where {text}" if text else "all rows")


def of_condition(condition: Condition) -> str:
    """Return the condition in words; "" if it is always true."""
    match condition:
        case Comparison():
            return _test(condition)
        case AllOf():
            parts = [text for part in condition.parts if (text := _inside(part, AnyOf))]
            return " and ".join(parts)
        case AnyOf():
            parts = [_inside(part, AllOf) or "always" for part in condition.parts]
            return " or ".join(parts) or "never"


def _inside(part: Condition, other: type[AllOf | AnyOf]) -> str:
    text = of_condition(part)
    is_compound = isinstance(part, other) and len(part.parts) > 1
    return f"({text})" if text and is_compound else text


def _test(test: Comparison) -> str:
    values = [_operand(operand) for operand in test.operands]
    match test.op:
        case "in" | "not_in":
            shown = values[:_SHOWN] + ([f"and {len(values) - _SHOWN} more"] if len(values) > _SHOWN else [])
            return f"{test.column} {'not in' if test.op == 'not_in' else 'in'} ({', '.join(shown)})"
        case "between" | "not_between":
            word = "not between" if test.op == "not_between" else "between"
            return f"{test.column} {word} {values[0]} and {values[1]}"
    return f"{test.column} {_SIGNS.get(test.op, test.op)} {values[0]}"


def _operand(operand: Operand) -> str:
    match operand:
        case Param():
            return f"{'?' if operand.name.isdecimal() else ':'}{operand.name}"
        case Const():
            return _value(operand.value)


def _value(value: Value) -> str:
    if value is None:
        return "null"
    if isinstance(value, bytes):
        text = f"x'{value.hex()}'"
    elif isinstance(value, int | float):
        return repr(value)
    else:
        plain = value.iso if isinstance(value, Date | DateTime | Time) else str(value)
        text = "'" + plain.replace("'", "''") + "'"
    return text if len(text) <= _LONG else text[:_LONG] + "…"


def of_guard(guard: Guard, analysis: Analysis) -> str:
    """Return a sentence that says to which rows `guard` restricts the query while subscribers watch it."""
    table = analysis.dependencies[guard.place].table
    if isinstance(guard, KeyGuard):
        seen = ", ".join(analysis.dependencies[place].table for place in guard.sees)
        return f"while watched, of {table} only rows whose {guard.column} is found in {seen}"
    order = ", ".join(f"{name} descending" if descends else name for name, descends in guard.order)
    return f"while watched, of {table} only rows up to the last one shown, by {order}"
