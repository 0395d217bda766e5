"""Execution of one statement of a caller: its arguments, its limits and its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import apsw

from headwater.errors import AnswerTooLarge, InvalidRequest
from headwater.model.table import Row
from headwater.model.work.answer_limits import FEWER, MAX_ROWS, MEMORY, AnswerRows
from headwater.sources.query import Args
from headwater.sources.sqlite.catalog import Catalog
from headwater.sources.sqlite.connection import sqlite_errors
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.query.authorizer import MAX_LENGTH, Statement
from headwater.sources.sqlite.row_fetch import as_blobs, collect, extra_memory_of_blobs, join
from headwater.sources.sqlite.types import FROM_STORED, to_stored
from headwater.sources.write import Result

SPARE = 1 << 10  # bytes of a value allowed above the limit of an answer, so that the error names the limit
SHORT_ROW = 1 << 18  # bytes
SMALL_ROW = 8 << 20  # bytes: larger rows are read in a way that does not block other threads


def run_statement(
    connection: GuardedConnection, sql: str, args: Args, *, most: int | None = None, seconds: float | None = None
) -> Result:
    """Run one statement and return its result: at most `most` rows, within `seconds`, where given."""
    db, guard = connection.db, connection.guard
    statement = guard.examine(sql)
    _check_count(statement, args)
    guard.forget_statement()
    before = db.total_changes()
    db.set_last_insert_rowid(0)  # shows only an INSERT of this statement
    try:
        with sqlite_errors(), guard.limited(seconds) as within, _memory_errors():
            limit = MAX_ROWS if most is None else most
            bound, read = _bindings(args), _reader(connection.catalog, statement)
            rows, more = guard.in_tiers(
                statement, lambda last: _fetch(db, sql, bound, statement, limit, within, read, is_last=last)
            )
    except KeyError as error:
        raise InvalidRequest(f"argument {error.args[0]!r} is missing", hint="Send it in `args`.") from None
    changed = db.total_changes() != before
    return Result(
        columns=tuple(column.name for column in statement.columns),
        rows=rows,
        affected=db.changes() if changed else 0,
        last_insert_id=db.last_insert_rowid(),
        truncated=more,
    )


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (MemoryError, apsw.NoMemError):
        hint = "Compute smaller values in one statement; if other large statements are running, try again."
        raise AnswerTooLarge("SQLite ran out of memory in this statement", hint=hint) from None


def _reader(catalog: Catalog, statement: Statement) -> Callable[[Any], Row]:
    """Return the function that converts a stored row to values."""
    readers = [FROM_STORED.get(catalog.kind(column)) for column in statement.columns]
    if not any(readers):
        return tuple
    return lambda row: tuple([read(value) if read else value for read, value in zip(readers, row, strict=True)])


def _fetch(
    db: apsw.Connection,
    sql: str,
    bindings: Any,
    statement: Statement,
    limit: int,
    within: Callable[[int], None],
    read: Callable[[Any], Row],
    *,
    is_last: bool,
) -> tuple[AnswerRows, bool]:
    """Return the rows of a statement, and whether there are more; text that is not UTF-8 gets surrogates.

    A read-only statement first runs with limits for small rows. If a value is larger, or is not UTF-8, the statement
    runs again with its text as blobs: other threads wait while blobs are copied, not while they are decoded. Unless
    `is_last`, a value that is too large raises TooBigError: the caller runs the statement again with wider limits.
    """
    width, most = len(statement.columns), MEMORY.max_bytes
    if not statement.read_only:  # a statement that writes cannot run twice
        return collect(db.execute(sql, bindings), read, limit, to_end=True)
    small = SMALL_ROW // max(width, 1)
    cap = db.limit(apsw.SQLITE_LIMIT_LENGTH)
    # Short values first: they need fewer checks of the clock, and each check blocks other threads.
    sizes = sorted({min(SHORT_ROW, small, cap), min(small, cap)})
    for place, size in enumerate(sizes):
        within(size)
        try:
            return collect(db.execute(sql, bindings), read, limit)
        except UnicodeDecodeError:
            break
        except apsw.TooBigError:
            if not is_last and place == len(sizes) - 1:
                raise
    within(most + SPARE)
    blobs = as_blobs(sql.rstrip().rstrip(";"), width, most=most)
    try:
        return collect(db.execute(blobs, bindings), lambda row: read(join(row)), limit, extra=extra_memory_of_blobs)
    except apsw.TooBigError:
        if not is_last or cap < most:
            raise
        made = f"the statement makes a value or a row of more than {min(most, MAX_LENGTH)} bytes"
        raise AnswerTooLarge(made, hint=FEWER) from None


def _check_count(statement: Statement, args: Args) -> None:
    """Raise InvalidRequest for too many or too few positional arguments; named arguments are looked up when needed."""
    wanted = len(statement.parameters)
    if not isinstance(args, dict) and len(args) != wanted:
        takes = "1 argument" if wanted == 1 else f"{wanted} arguments"
        hint = "Send one for each `?`, in their order." if wanted else "Leave them out, or write `?` where they belong."
        raise InvalidRequest(f"the statement takes {takes}, {len(args)} given", hint=hint)


def _bindings(args: Args) -> Any:
    if isinstance(args, dict):
        return {name: to_stored(value) for name, value in args.items()}
    return [to_stored(value) for value in args]
