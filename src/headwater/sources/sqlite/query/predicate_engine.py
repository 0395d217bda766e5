"""Evaluation of predicates by SQLite itself, on an in-memory table that compares like the table of a shape."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import apsw

from headwater.errors import HeadwaterError, InvalidRequest, NotSupported
from headwater.model.literal import is_broken_text
from headwater.model.table import Column, Key, Row, Table
from headwater.sources.request_checks import column_of
from headwater.sources.sqlite.connection import OURS, ident, sqlite_errors, to_error
from headwater.sources.sqlite.key_order import as_stored
from headwater.sources.sqlite.query.affinity import affinity, declaration, doubt, may_be_strict_any
from headwater.sources.sqlite.query.authorizer import BAD_FUNCTIONS, harden
from headwater.sources.sqlite.query.slow_functions import (
    PATTERN,
    SLOW,
    LinearFunctions,
    StatementLimits,
    capped,
    tiers_of,
)
from headwater.sources.sqlite.query.statement_cost import Cost, cost_of
from headwater.sources.sqlite.types import FROM_STORED, Stored, to_stored

BATCH = 1_000  # rows evaluated at a time
SECONDS = 1.0  # of processor time per batch; other load on the machine does not count
MAX_VALUE = 1 << 18  # bytes of a value that a predicate computes, apart from the values of the row
MAX_CAPPED = 1 << 16  # the same limit for functions without a linear form: one call takes less than a second
MAX_TEXTS = 1_000  # predicates whose functions are cached
_STEPS = 100  # virtual machine steps between two checks of the clock: a step may call a slow function
_LIMITS = {
    apsw.SQLITE_LIMIT_ATTACHED: 0,
    apsw.SQLITE_LIMIT_EXPR_DEPTH: 200,
    apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: PATTERN,
}
_MAX_LENGTH = 1_000_000_000  # SQLite's own limit
# SQLite declares these deterministic, but the data may contain 'now'.
_CLOCKS = {"date", "time", "datetime", "julianday", "strftime", "unixepoch", "timediff"}
_AFFINITY = f"{OURS}affinity"


class Engine:
    """Evaluator of predicates on rows of one table shape. Thread-safe: each call holds the lock."""

    def __init__(self, table: Table, *, seconds: float = SECONDS) -> None:
        self.table = table
        self._seconds = seconds
        self._place = f"{OURS}place"
        while self._place in table.index:
            self._place += "_"
        self._name = ident(table.name)
        self._doubts = {column.name: why for column in table.columns if (why := doubt(table, column))}
        self._lock = threading.Lock()  # guards the attributes below
        self._stop_at = math.inf
        self._called: dict[str, tuple[frozenset[str], Cost]] = {}  # predicate to the functions it calls and its cost
        self._linear: LinearFunctions | None = None  # set once a value was too long for the built-in functions
        with sqlite_errors():
            self._db = self._open()

    def _open(self) -> apsw.Connection:
        db = apsw.Connection(":memory:")
        for option in (apsw.SQLITE_DBCONFIG_DQS_DML, apsw.SQLITE_DBCONFIG_DQS_DDL):
            db.config(option, 0)  # otherwise a misspelt column in double quotes would be text
        for limit, value in _LIMITS.items():
            db.limit(limit, value)
        columns = [f"{ident(self._place)} INTEGER PRIMARY KEY", *map(declaration, self.table.columns)]
        db.execute(f"CREATE TABLE {self._name} ({', '.join(columns)})")
        db.execute(f"CREATE TABLE {_AFFINITY} (text TEXT, number NUMERIC)")
        harden(db)
        return db

    # --- the text --------------------------------------------------------------------------------------------

    def examine(self, where: str) -> tuple[str, ...]:
        """Return the columns that `where` reads; InvalidRequest or NotSupported if it is not a predicate on one row."""
        with self._lock:
            try:
                # In an index SQLite allows an expression to read only the row.
                index = f"CREATE INDEX {OURS}probe ON {self._name} ({ident(self._place)}) WHERE (\n{where}\n)"
                self._prepare(index)
                read, called = self._accesses(where)
            except apsw.Error as error:
                raise self._refusal(str(error)) from None
        if self._place in read:
            raise self._refusal("no such column: rowid")
        for function in sorted(called & _CLOCKS):
            raise NotSupported(
                f"{function}() may depend on the current time",
                hint="Compare the text itself: ISO dates sort as text; substr(column, 1, 10) is the day.",
            )
        for name in sorted(read & self._doubts.keys()):
            raise NotSupported(f"column {name!r} {self._doubts[name]}", hint="Filter by other columns.")
        self._try(where)
        return tuple(name for name in self.table.names if name in read)

    def _accesses(self, where: str) -> tuple[set[str], set[str]]:
        """Return the columns read and the functions called. No brackets around `where`: `1) OR (1` must fail."""
        read: set[str] = set()
        called: set[str] = set()

        def note(op: int, a: str | None, b: str | None, database: str | None, by: str | None) -> int:
            if op == apsw.SQLITE_READ and b:
                read.add(b)
            if op == apsw.SQLITE_FUNCTION and b:
                called.add(b.lower())
                return apsw.SQLITE_DENY if b.lower() in BAD_FUNCTIONS else apsw.SQLITE_OK
            return apsw.SQLITE_OK

        self._db.authorizer = note
        try:
            self._prepare(f"SELECT 1 FROM {self._name} WHERE {where}\n")
        finally:
            self._db.authorizer = None
        return read, called

    def _prepare(self, sql: str) -> None:
        """Let SQLite prepare only the first statement: another one, still unchecked, may follow it in the text."""
        self._db.execute(f"EXPLAIN {sql}").close(True)

    def _refusal(self, text: str) -> HeadwaterError:
        names = ", ".join(self.table.names)
        if "subqueries prohibited" in text:
            return NotSupported("a predicate reads one row: it has no subqueries", hint="Use only columns of the row.")
        if "non-deterministic" in text or "unsafe use" in text:
            return NotSupported(
                "a function in the predicate depends on more than its arguments", hint="Compare with a constant."
            )
        if "parameters prohibited" in text:
            return InvalidRequest("a predicate has no parameters", hint="Write the value itself into the predicate.")
        if "no such column" in text:
            return InvalidRequest(f"the predicate: {text}", hint=f"The columns are {names}; text takes 'quotes'.")
        if "too large" in text or "Recursion" in text or "overflow" in text:
            return InvalidRequest(
                f"the predicate is nested too deeply: {text}", hint="Write many ORs of one column as IN (…)."
            )
        return InvalidRequest(
            f"the predicate is not one SQL expression over a row: {text}",
            hint=f"Write it as after WHERE, such as total > 100 AND state = 'open'. The columns are {names}.",
        )

    def _try(self, where: str) -> None:
        """Reject a predicate that is too expensive even on a row of NULLs; other failures depend on the row."""
        with self._lock, contextlib.suppress(apsw.SQLError):
            try:
                self._judge(where, (), [()])
            except _EXPENSIVE as error:
                raise _failure(error) from None

    def explain(self, where: str) -> list[tuple[Any, ...]] | None:
        """Return the opcodes that SQLite compiles `where` to, equal only for equal behaviour; None if that fails."""
        with self._lock:
            try:
                found = self._db.execute(f"EXPLAIN SELECT 1 FROM {self._name} WHERE (\n{where}\n)").fetchall()
            except (apsw.Error, UnicodeDecodeError):  # EXPLAIN shows a blob as text
                return None
        return [row[:7] for row in found]

    def literal(self, text: str) -> Stored:
        """Return the value of a numeric literal; the caller has checked its characters."""
        with self._lock, sqlite_errors():
            ((value,),) = self._db.execute(f"SELECT {text}").fetchall()
        return value

    def as_compared(self, column: Column, value: Stored) -> Stored:
        """Return a literal as SQLite compares it with `column`, after applying the column's affinity."""
        kind = affinity(column)
        if kind == "BLOB" or (kind == "TEXT") == isinstance(value, str):
            return value
        cell = "text" if kind == "TEXT" else "number"
        with self._lock, sqlite_errors(), self._cleared(_AFFINITY):
            self._db.execute(f"INSERT INTO {_AFFINITY} ({cell}) VALUES (?)", (value,))
            ((found,),) = self._db.execute(f"SELECT {cell} FROM {_AFFINITY}").fetchall()
        return found

    # --- rows ------------------------------------------------------------------------------------------------

    def holds(self, where: str, columns: Sequence[str], rows: Sequence[Row]) -> list[bool]:
        """Return for each of `rows` whether `where` is true, which reads `columns`; InvalidRequest if it fails."""
        pick = self._picker(columns)
        found: list[bool] = []
        for start in range(0, len(rows), BATCH):
            found += self._batch(where, columns, [pick(row) for row in rows[start : start + BATCH]])
        return found

    def _batch(self, where: str, columns: Sequence[str], rows: list[tuple[Stored, ...]]) -> list[bool]:
        found = [False] * len(rows)
        with self._lock:
            try:
                for place in self._judge(where, columns, rows):
                    found[place - 1] = True  # SQLite numbers from one
            except apsw.Error as error:
                raise _failure(error) from None
        return found

    def _judge(self, where: str, columns: Sequence[str], rows: list[tuple[Stored, ...]]) -> list[int]:
        sql = f"SELECT {ident(self._place)} FROM {self._name} WHERE (\n{where}\n)"
        called, cost = self._functions(where, sql)
        tiers = tiers_of(called, cost)
        try:
            with self._cleared(self._name):
                self._fill(columns, rows)
                self._stop_at = time.thread_time() + self._seconds
                if tiers:
                    with contextlib.suppress(apsw.TooBigError):
                        return self._bounded(sql, tiers[1].length or MAX_VALUE, tiers[1])
                if capped(called):
                    return self._bounded(sql, min(MAX_CAPPED, tiers[-1].length or MAX_CAPPED), tiers[-1])
                try:
                    most = min(MAX_VALUE, cost.length)
                    return self._bounded(sql, most, _tier_for(tiers, most))
                except apsw.TooBigError:
                    # Values of the row itself may be larger, and SQLite has one limit for both.
                    sizes = (len(cell) for row in rows for cell in row if isinstance(cell, str | bytes))
                    most = min(8 * max(sizes, default=0), cost.length)
                    if most <= MAX_VALUE:
                        raise
                    return self._bounded(sql, most, _tier_for(tiers, most))
        finally:
            self._stop_at = math.inf

    def _functions(self, where: str, sql: str) -> tuple[frozenset[str], Cost]:
        found = self._called.get(where)
        if found is None:
            if len(self._called) >= MAX_TEXTS:
                self._called.clear()
            called = frozenset(self._accesses(where)[1])
            listed = self._db.execute(f"EXPLAIN {sql}")
            found = self._called[where] = called, cost_of(sql, listed, SLOW)
            listed.close(True)
        return found

    def _bounded(self, sql: str, most: int, tier: StatementLimits | None) -> list[int]:
        if tier is not None and tier.linear and self._linear is None:
            self._linear = LinearFunctions(self._db, self._check_time)
        self._db.limit(apsw.SQLITE_LIMIT_LENGTH, most)
        self._db.limit(apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, PATTERN if tier is None else tier.pattern)
        steps = _STEPS if tier is None else min(tier.steps, _STEPS)
        self._db.set_progress_handler(lambda: time.thread_time() > self._stop_at, steps)
        try:
            return [place for (place,) in self._db.execute(sql)]
        finally:
            self._db.set_progress_handler(None)
            self._db.limit(apsw.SQLITE_LIMIT_LENGTH, _MAX_LENGTH)

    def _check_time(self) -> None:
        if time.thread_time() > self._stop_at:
            raise apsw.InterruptError("interrupted")

    def stored(self, columns: Sequence[str], values: Key) -> Key:
        """Return `values` as read back after an INSERT into `columns`; InvalidRequest if a column cannot hold one."""
        into = [column_of(self.table, name) for name in columns]
        given = tuple(map(to_stored, values))
        with self._lock, sqlite_errors(), self._cleared(self._name):
            self._fill(columns, [given])
            (found,) = self._db.execute(f"SELECT {', '.join(map(ident, columns))} FROM {self._name}").fetchall()
        for column, before, after in zip(into, given, found, strict=True):
            _check_held(self.table, column, before, after)
        read = [FROM_STORED.get(column.kind) for column in into]
        return tuple(f(cell) if f else cell for f, cell in zip(read, found, strict=True))

    def _picker(self, columns: Sequence[str]) -> Callable[[Row], tuple[Any, ...]]:
        """Return a function that extracts the stored cells of `columns` from a row."""
        if not columns:
            return lambda row: ()
        places = [self.table.index[name] for name in columns]
        is_plain = not any(self.table.columns[place].kind in FROM_STORED for place in places)
        if len(places) == 1:
            (place,) = places
            return lambda row: (as_stored(row[place]),)
        pick = itemgetter(*places)
        return pick if is_plain else lambda row: tuple(map(as_stored, pick(row)))

    def _fill(self, columns: Sequence[str], rows: list[tuple[Stored, ...]]) -> None:
        try:
            self._db.executemany(self._insert(columns, "?" * len(columns)), rows)
        except UnicodeEncodeError:
            self._db.execute(f"DELETE FROM {self._name}")
            for row in rows:
                marks = ["CAST(? AS TEXT)" if _is_broken(cell) else "?" for cell in row]
                cells = [str(c).encode("utf-8", "surrogateescape") if _is_broken(c) else c for c in row]
                self._db.execute(self._insert(columns, marks), cells)

    def _insert(self, columns: Sequence[str], marks: Sequence[str]) -> str:
        if not columns:
            return f"INSERT INTO {self._name} DEFAULT VALUES"
        return f"INSERT INTO {self._name} ({', '.join(map(ident, columns))}) VALUES ({', '.join(marks)})"

    @contextmanager
    def _cleared(self, name: str) -> Iterator[None]:
        """Allow inserts into a table inside the block, and empty the table afterwards."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute(f"DELETE FROM {name}")
            self._db.execute("COMMIT")


def _tier_for(tiers: Sequence[StatementLimits], most: int) -> StatementLimits | None:
    """Return the limits for values of `most` bytes, after those of the first two tiers failed."""
    return next((tier for tier in tiers[2:] if tier.length is None or tier.length >= most), None)


_EXPENSIVE = (apsw.InterruptError, apsw.TooBigError)


def _failure(error: apsw.Error) -> HeadwaterError:
    match error:
        case apsw.InterruptError():
            return InvalidRequest(f"the predicate takes too long for {BATCH} rows", hint="Use a simpler predicate.")
        case apsw.TooBigError():
            return InvalidRequest("the predicate computes a value that is too large", hint="Use a simpler predicate.")
        case apsw.SQLError():
            return InvalidRequest(
                f"the predicate fails on a row: {error}",
                hint="Make it work for every possible row, such as json_valid(x) AND json_extract(x, '$.a') = 1.",
            )
        case _:
            return to_error(error)


def _check_held(table: Table, column: Column, given: Stored, held: Stored) -> None:
    if held is None and not column.nullable:
        raise InvalidRequest(f"column {column.name!r} cannot hold NULL")
    if (column.auto or column.hidden) and not isinstance(held, int):
        raise InvalidRequest(f"column {column.name!r} holds integers only")
    if may_be_strict_any(table, column) and type(given) is not type(held):
        raise NotSupported(f"column {column.name!r} {doubt(table, column)}", hint="Send a number as a number.")


def _is_broken(cell: Stored) -> bool:
    return isinstance(cell, str) and is_broken_text(cell)
