"""Statements of callers: arguments to PostgreSQL's text, and rows of its answer to our values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from headwater.errors import InvalidRequest
from headwater.model.literal import Value
from headwater.model.table import Row
from headwater.sources.postgres.connection import error_of
from headwater.sources.postgres.types import Convert, Types, converter

MAX_ROWS = 100_000  # of one statement's answer; past it the answer says `truncated`
MAX_BYTES = 64 << 20

_TOKEN = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|--[^\n]*|/\*.*?\*/|\$(?P<tag>[A-Za-z_]*)\$.*?\$(?P=tag)\$|::|:(?P<name>[A-Za-z_]\w*)""",
    re.DOTALL,
)


def placed(sql: str, args: Sequence[Value] | dict[str, Value]) -> tuple[str, list[Value]]:
    """The statement with `$1`, `$2` … for its parameters, which may be written `:name`, and their values."""
    if not isinstance(args, dict):
        return sql, list(args)
    places: dict[str, int] = {}

    def place(found: re.Match[str]) -> str:
        name = found["name"]
        if name is None:
            return found[0]
        if name not in args:
            raise InvalidRequest(f"there is no argument {name!r}", hint="Give a value for every :name.")
        return f"${places.setdefault(name, len(places) + 1)}"

    text = _TOKEN.sub(place, sql)
    return text, [args[name] for name in places]


def argument(value: Value) -> bytes | None:
    """A value as PostgreSQL reads it; None is NULL."""
    match value:
        case None:
            return None
        case bool():
            return b"true" if value else b"false"
        case bytes():
            return b"\\x" + value.hex().encode()
        case float() if math.isinf(value):
            return b"Infinity" if value > 0 else b"-Infinity"
        case float():
            return repr(value).encode()
        case _:
            text = str(value)
            if "\0" in text:
                raise InvalidRequest("PostgreSQL's texts cannot hold a NUL character")
            return text.encode()


def run(
    connection: PGconn, sql: str, args: Sequence[Value], types: Types
) -> tuple[tuple[str, ...], tuple[Row, ...], bool, int]:
    """One statement: columns, rows, whether there were more than an answer holds, and how many rows it touched."""
    connection.send_query_params(sql.encode(), [argument(value) for value in args])
    connection.set_single_row_mode()
    columns: tuple[str, ...] = ()
    rows: list[Row] = []
    weight = affected = 0
    cut, failed = False, None
    converts = None
    while (result := connection.get_result()) is not None:
        if result.status in (pq.ExecStatus.SINGLE_TUPLE, pq.ExecStatus.TUPLES_OK):
            if converts is None:
                columns = tuple((result.fname(place) or b"").decode() for place in range(result.nfields))
                converts = [converter(result.ftype(place), types) for place in range(result.nfields)]
            for number in range(0 if cut else result.ntuples):
                row, size = _row(result, number, converts)
                rows.append(row)
                weight += size
            if not cut and (len(rows) > MAX_ROWS or weight > MAX_BYTES):
                cut = True
                connection.get_cancel().cancel()
            affected = result.command_tuples or affected
        elif result.status == pq.ExecStatus.COMMAND_OK:
            affected = result.command_tuples or 0
        elif result.status == pq.ExecStatus.FATAL_ERROR:
            failed = result
        else:
            raise InvalidRequest("COPY cannot be run here", hint="Send a query.")
    if failed is not None and not cut:
        state = (failed.error_field(pq.DiagnosticField.SQLSTATE) or b"08006").decode()
        raise error_of(state, (failed.error_message or b"the connection was lost").decode("utf-8", "replace"))
    return columns, tuple(rows[:MAX_ROWS]), cut, affected


def _row(result: PGresult, number: int, converts: Sequence[Convert]) -> tuple[Row, int]:
    values: list[Value] = []
    size = 0
    for place, convert in enumerate(converts):
        data = result.get_value(number, place)
        if data is None:
            values.append(None)
            continue
        size += len(data)
        text = data.decode()
        try:
            values.append(convert(text))
        except (ValueError, LookupError, ArithmeticError):
            values.append(text)  # as the stream has it
    return tuple(values), size
