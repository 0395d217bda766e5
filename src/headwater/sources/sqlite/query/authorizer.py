"""Permissions of callers' statements: an authorizer for every prepare, and the engine's report on a statement."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import apsw
import msgspec

from headwater.errors import AnswerTooLarge, Busy, InvalidRequest, Unavailable
from headwater.sources.sqlite.connection import OURS, sqlite_errors
from headwater.sources.sqlite.query.percentiles import replace_percentiles
from headwater.sources.sqlite.query.slow_functions import (
    LONG_PATTERN,
    PATTERN,
    SLOW,
    TOO_COMPLEX,
    LinearFunctions,
    StatementLimits,
    capped,
    tiers_of,
)
from headwater.sources.sqlite.query.statement_cost import Cost, cost_of, is_plain
from headwater.sources.sqlite.query.statement_growth import check_growth

T = TypeVar("T")

_DENIED = {
    apsw.SQLITE_TRANSACTION,
    apsw.SQLITE_SAVEPOINT,
    apsw.SQLITE_ATTACH,
    apsw.SQLITE_DETACH,
    apsw.SQLITE_PRAGMA,
    # Callers share the writer's connection: no temporary object of one caller may remain for the next.
    apsw.SQLITE_CREATE_TEMP_INDEX,
    apsw.SQLITE_CREATE_TEMP_TABLE,
    apsw.SQLITE_CREATE_TEMP_TRIGGER,
    apsw.SQLITE_CREATE_TEMP_VIEW,
}
_KINDS = ("INDEX", "TABLE", "TRIGGER", "VIEW", "VTABLE")
_SCHEMA = {getattr(apsw, f"SQLITE_{verb}_{kind}") for verb in ("CREATE", "DROP") for kind in _KINDS}
_SCHEMA.add(apsw.SQLITE_ALTER_TABLE)
_HARMLESS = {apsw.SQLITE_ANALYZE, apsw.SQLITE_REINDEX}  # without a name they apply to every table, ours included
_READ_PRAGMAS = {"data_version", "page_size"}  # used by FTS5, FTS4 and R-Tree inside a caller's statement
OUR_TRIGGER = re.compile(OURS + r"\d+_[a-z_]+")
_NOTHING_MORE = re.compile(r"(?>\s|;|--[^\n]*|/\*.*?(?:\*/|\Z))*+", re.DOTALL)
_FIRST_WORD = re.compile(r"\ufeff?" + _NOTHING_MORE.pattern + r"([A-Za-z]+)", re.DOTALL)
MAX_LENGTH = 129 << 20  # bytes of a value or row in a caller's statement: old and new of 64 MiB fit a capture row
# With sample statistics (sqlite_stat4) SQLite calls functions of constants while it prepares a statement.
_PREPARE_LENGTH = 2 << 10
_TOO_LONG = (apsw.TooBigError, apsw.NoMemError)  # NoMemError: a constant is too long to be prepared
# Virtual machine steps between two checks of the clock, by the length of values: a step may call a function on a value.
# Every check waits for the interpreter's lock, so checks are rare where values are short.
_STEPS = {1 << 18: 20_000, 1 << 20: 5_000, 8 << 20: 500, MAX_LENGTH: 50}
_MOST_STEPS = max(_STEPS.values())
_WRITE_STEPS = 5_000  # for a statement that writes: such a statement runs only once, with values of any length
# Of the functions in pragma_function_list only these reach outside the database: load_extension runs code from a file,
# fts3_tokenizer reads and writes a function pointer (its argument need only be bound), sqlite_log writes to the
# process's error log, and geopoly_debug sets a flag of the whole process. All other functions only compute.
BAD_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "sqlite_log", "geopoly_debug"})
# Of the modules in pragma_module_list only this one calls a tokenizer by its pointer without a table of its own.
_BAD_MODULES = frozenset({"fts3tokenize"})
MAX_KNOWN_TEXT = 16 << 10  # characters; longer statements are not cached, since each connection caches a thousand
_ROW_STATEMENTS = frozenset({"SELECT", "VALUES", "WITH", "INSERT", "REPLACE", "UPDATE", "DELETE"})

# This mark in our own statements keeps callers' texts from ever matching our cached statements.
_MARK = f"/*{secrets.token_hex(8)}*/"


@functools.cache
def _marked(sql: str) -> str:
    return sql + _MARK


ANY_BINDINGS: apsw.Bindings = apsw._null_bindings  # type: ignore[attr-defined]  # as apsw.ext.query_info passes it


class Access(msgspec.Struct, frozen=True):
    """One call of the authorizer: the action, its two names, and the view or trigger that causes it."""

    op: int
    a: str | None
    b: str | None
    by: str | None


class Answer(msgspec.Struct, frozen=True):
    """A result column of a statement, and the table column behind it, if any."""

    name: str
    declared: str | None
    table: str | None
    column: str | None


class Statement(msgspec.Struct, frozen=True):
    """SQLite's report on one statement, prepared but not run."""

    read_only: bool
    schema: bool  # changes the schema
    rows: bool  # SELECT, INSERT, UPDATE or DELETE, which callers other than owners may send
    alters: str | None = None  # the table of an ALTER TABLE
    columns: tuple[Answer, ...] = ()
    parameters: tuple[str | None, ...] = ()  # by position; names include their mark, None for a bare ?
    functions: frozenset[str] = frozenset()  # functions called by the statement, its views and triggers other than ours
    cost: Cost = Cost()


class Guard:
    """Authorizer and limits of one connection. Statements of `own` always pass; all others are a caller's."""

    def __init__(self, db: apsw.Connection, seconds: float, is_stopping: threading.Event | None = None) -> None:
        self._db = db
        self._seconds = seconds
        self._is_stopping = is_stopping or threading.Event()
        self._deadline = math.inf
        self._heap = sys.maxsize  # bytes of all connections, above which statements on this connection are stopped
        self._is_limited = False  # whether a caller's statement runs
        self._is_starved = False  # whether the statement was stopped for its memory
        self.is_ended = False  # whether callers' statements in the current transaction are stopped
        self._cap = MAX_LENGTH  # maximum bytes of a value in the current tier
        self._most_steps = _MOST_STEPS  # maximum steps between checks of the clock in the current tier
        self._steps = 0
        self._set_steps(_MOST_STEPS)
        db.limit(apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, PATTERN)
        self._linear: LinearFunctions | None = None  # set once a value was too long for the built-in functions
        self._called: set[str] = set()  # functions that the current statement calls
        self._ours = False
        self._dropping: str | None = None  # the table being dropped; its triggers, ours included, are dropped with it
        self._seen: list[tuple[int, str | None, str | None]] = []  # schema changes by the current statement
        self._known: dict[str, Statement] = {}
        harden(db)
        replace_percentiles(db, self.check_time)
        self._noted: list[Access] | None = None  # authorizer calls of the statement being examined
        db.authorizer = self._authorize

    def run(self, sql: str, bindings: apsw.Bindings = ()) -> apsw.Cursor:
        """Run one of our own statements, which always passes; raises apsw errors."""
        before, self._ours = self._ours, True
        try:
            return self._db.execute(_marked(sql), bindings)
        finally:
            self._ours = before

    @contextlib.contextmanager
    def own(self) -> Iterator[apsw.Connection]:
        """Treat all statements on the connection as ours inside the block, for example to install triggers."""
        before, self._ours = self._ours, True
        try:
            yield self._db
        finally:
            self._ours = before

    @contextlib.contextmanager
    def limited(self, seconds: float | None = None) -> Iterator[Callable[[int], None]]:
        """Stop a caller's statement in the block after `seconds`; the yielded function limits the bytes of values."""
        seconds = self._seconds if seconds is None else seconds
        self._deadline, self._is_limited, self._is_starved = time.monotonic() + seconds, True, False
        before = self._db.limit(apsw.SQLITE_LIMIT_LENGTH, MAX_LENGTH)
        try:
            yield self._limit_length
        except apsw.InterruptError:
            if self._is_starved:
                raise Busy(
                    f"the running statements need more than {self._heap >> 20} MiB of memory",
                    hint="Sort and materialize less in one statement, or try again in a moment.",
                ) from None
            if self._is_stopping.is_set():
                raise Unavailable("the server is stopping") from None
            if self.is_ended:
                raise Busy(
                    "the statement was stopped: the -wal file is above its limit, and reads prevent its reuse",
                    hint="Try again in a moment, with statements that read less.",
                ) from None
            if time.monotonic() < self._deadline:
                raise
            raise InvalidRequest(
                f"the statement ran longer than {seconds:g} seconds and was stopped",
                hint="Nothing was written. Use smaller steps, or raise sqlite.statement_seconds.",
            ) from None
        finally:
            self._deadline, self._is_limited = math.inf, False
            self._db.limit(apsw.SQLITE_LIMIT_LENGTH, before)
            self._set_steps(_MOST_STEPS)

    def _limit_length(self, most: int) -> None:
        most = min(most, self._cap)
        self._db.limit(apsw.SQLITE_LIMIT_LENGTH, most)
        self._set_steps(min(self._most_steps, next(steps for length, steps in _STEPS.items() if most <= length)))

    @property
    def is_linear(self) -> bool:
        """Return whether the connection uses linear functions in Python; SQLite cannot restore the built-in ones."""
        return self._linear is not None

    def in_tiers(self, statement: Statement, run: Callable[[bool], T]) -> T:
        """Call `run` inside `limited`, with limits that keep every function call of `statement` short.

        `run` is called again with wider limits if a value was too long; its argument is True for the widest limits.
        """
        tiers = tiers_of(statement.functions, statement.cost)
        if not tiers and statement.cost.length >= MAX_LENGTH:
            if not statement.read_only:
                self._set_steps(_WRITE_STEPS)
            return run(True)
        if not tiers:
            return self._in_last(
                StatementLimits(None, _MOST_STEPS if statement.read_only else _WRITE_STEPS), statement, run
            )
        if statement.schema:  # a schema change reads the whole schema in its own steps
            tiers = (msgspec.structs.replace(tiers[-1], length=None, pattern=LONG_PATTERN),)
        for tier in tiers[:-1]:
            if self.is_linear and not tier.linear:
                continue
            try:
                with self._undone(statement), self._at(tier, statement.cost):
                    return run(False)
            except _TOO_LONG:
                continue
            except apsw.SQLError as error:
                if str(error) != TOO_COMPLEX or tier.pattern >= PATTERN:
                    raise
        with self._undone(statement):
            return self._in_last(tiers[-1], statement, run)

    def _in_last(self, tier: StatementLimits, statement: Statement, run: Callable[[bool], T]) -> T:
        with self._at(tier, statement.cost):
            try:
                return run(tier.length is None)
            except apsw.TooBigError:
                if self._cap >= MAX_LENGTH:
                    raise
                raise _too_long(statement, tier, self._cap) from None

    @contextlib.contextmanager
    def _at(self, tier: StatementLimits, cost: Cost) -> Iterator[None]:
        if tier.linear:
            self._use_linear()
        self._cap = min(MAX_LENGTH if tier.length is None else tier.length, cost.length)
        before = self._db.limit(apsw.SQLITE_LIMIT_LENGTH, self._cap)
        self._db.limit(apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, tier.pattern)
        self._most_steps = tier.steps
        self._set_steps(tier.steps)
        try:
            yield
        finally:
            self._cap, self._most_steps = MAX_LENGTH, _MOST_STEPS
            self._db.limit(apsw.SQLITE_LIMIT_LENGTH, before)
            self._db.limit(apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, PATTERN)
            self._set_steps(_MOST_STEPS)

    @contextlib.contextmanager
    def _undone(self, statement: Statement) -> Iterator[None]:
        """Undo the writes of a failed statement: SQLite does so only for errors that it expects."""
        if statement.read_only:
            yield
            return
        self.run("SAVEPOINT tier")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self.run("ROLLBACK TO tier")
                self.run("RELEASE tier")
            raise
        if self._db.in_transaction:
            self.run("RELEASE tier")

    def _use_linear(self) -> None:
        if self._linear is None:
            self._linear = LinearFunctions(self._db, self.check_time)

    def _set_steps(self, steps: int) -> None:
        if steps != self._steps:
            self._steps = steps
            self._db.set_progress_handler(self._is_late, steps)

    def end(self) -> None:
        """Stop the caller's statement in the current transaction."""
        self.is_ended = True

    def limit_heap(self, most: int) -> None:
        """Stop a caller's statement once SQLite uses more than `most` bytes in the whole process."""
        self._heap = most

    def _is_late(self) -> bool:
        if self._is_limited and apsw.memory_used() > self._heap:
            self._is_starved = True
            return True
        if self._is_limited and (self.is_ended or self._is_stopping.is_set()):
            return True
        return time.monotonic() > self._deadline

    def check_time(self) -> None:
        """Raise InterruptError, which `limited` converts, once the time of the statement is up."""
        if self._is_late():
            raise apsw.InterruptError("interrupted")

    @contextlib.contextmanager
    def preparing(self) -> Iterator[Callable[[], object]]:
        """Limit the preparation of a caller's statement; the yielded function ends the limit on value lengths."""
        before = self._db.limit(apsw.SQLITE_LIMIT_LENGTH, MAX_LENGTH if self.is_linear else _PREPARE_LENGTH)
        until = self._deadline
        self._deadline = min(until, time.monotonic() + self._seconds)
        try:
            yield lambda: self._db.limit(apsw.SQLITE_LIMIT_LENGTH, before)
        finally:
            self._db.limit(apsw.SQLITE_LIMIT_LENGTH, before)
            self._deadline = until

    def examine(self, sql: str) -> Statement:
        """Return the report on `sql`, prepared but not run; InvalidRequest if it is invalid, multiple or denied."""
        found = self._known.get(sql)
        if found is None:
            found = self._prepare(sql)
            if len(sql) <= MAX_KNOWN_TEXT:
                if len(self._known) >= 1_000:
                    self._known.clear()
                self._known[sql] = found
        return found

    def accesses(self, sql: str) -> tuple[Statement, list[Access]]:
        """Return the engine's report on `sql`, and all authorizer calls during its preparation."""
        self._noted = []
        try:
            return self._prepare(sql), self._noted
        finally:
            self._noted = None

    def forget_statement(self) -> None:
        """Clear the recorded effects of the previous statement."""
        self._seen, self._dropping = [], None

    def forget(self) -> None:
        """Clear the cached statements after a schema change."""
        self._known.clear()

    def _prepare(self, sql: str) -> Statement:
        _refuse_trigger_names(sql)
        check_growth(sql, self.views())
        cursor = self._db.cursor()
        seen: list[tuple[str, bool, tuple[Answer, ...], tuple[str | None, ...]]] = []

        def trace(found: apsw.Cursor, text: str, bindings: object) -> bool:
            if found.has_vdbe:
                columns = tuple(Answer(n, kind, table, column) for n, kind, _, table, column in found.description_full)
                seen.append((text, found.is_readonly, columns, tuple(found.bindings_names)))
            return False

        cursor.exec_trace = trace
        self.forget_statement()
        self._called = set()
        with contextlib.closing(cursor), sqlite_errors(), contextlib.suppress(apsw.ExecTraceAbort):
            self._prepared(lambda: cursor.execute(sql, ANY_BINDINGS, can_cache=False))
        if not seen:
            raise InvalidRequest("there is no statement in the text", hint="Send a statement such as SELECT 1.")
        text, read_only, columns, parameters = seen[0]
        if not _NOTHING_MORE.fullmatch(sql, sql.find(text) + len(text)):
            raise InvalidRequest("one statement at a time", hint="Send each alone, or use tx.begin and tx.commit.")
        alters = next((b for op, _, b in self._seen if op == apsw.SQLITE_ALTER_TABLE), None)
        functions, is_schema, is_of_rows = frozenset(self._called), bool(self._seen), _is_of_rows(sql)
        is_costly = is_of_rows and (bool(functions) or not is_plain(text))
        cost = self._cost(text) if is_costly else Cost()
        return Statement(read_only, is_schema, is_of_rows, alters, columns, parameters, functions, cost)

    @contextlib.contextmanager
    def _unnoted(self) -> Iterator[None]:
        """Do not note the authorizer calls of our own statements inside."""
        noted, self._noted = self._noted, None
        try:
            yield
        finally:
            self._noted = noted

    def views(self) -> dict[str, str]:
        """Return the views of the file: name to definition."""
        with self._unnoted(), sqlite_errors():
            found = self.run("SELECT name, sql FROM sqlite_schema WHERE type = 'view'").fetchall()
        return {str(name): str(text) for name, text in found}

    def _cost(self, sql: str) -> Cost:
        """Return the cost of a prepared statement's program."""
        with (
            self._unnoted(),
            self.own() as db,
            sqlite_errors(),
            self.preparing(),
            contextlib.closing(db.execute(f"EXPLAIN {sql}", ANY_BINDINGS, can_cache=False)) as listed,
        ):
            return cost_of(sql, listed, SLOW)

    def _prepared(self, prepare: Callable[[], object]) -> None:
        """Prepare a statement; retry with linear functions if a value in it is too long."""
        try:
            with self.preparing():
                prepare()
        except _TOO_LONG:
            if self.is_linear:
                raise
            self._use_linear()
            with self.preparing():
                prepare()

    def _authorize(self, op: int, a: str | None, b: str | None, db: str | None, by: str | None) -> int:
        if self._noted is not None:
            self._noted.append(Access(op, a, b, by))
        if self._ours or (by and OUR_TRIGGER.fullmatch(by)):
            return apsw.SQLITE_OK
        if op == apsw.SQLITE_FUNCTION and b is not None:
            self._called.add(b.lower())
        if op in _SCHEMA:
            self._seen.append((op, a, b))
        if op == apsw.SQLITE_DROP_TABLE:
            self._dropping = a
        if op == apsw.SQLITE_DROP_TRIGGER and b is not None and b == self._dropping:
            return apsw.SQLITE_OK
        return apsw.SQLITE_OK if _allows(op, a, b) else apsw.SQLITE_DENY


def _too_long(statement: Statement, tier: StatementLimits, most: int) -> InvalidRequest:
    name = capped(statement.functions)
    if tier.length is not None and name is not None:
        return InvalidRequest(
            f"a statement that calls {name}() takes values of at most {most} bytes",
            hint="Read and write longer values by a statement that does not call it.",
        )
    kind = AnswerTooLarge if statement.read_only else InvalidRequest
    return kind(
        f"a statement with so many function calls, arguments and operators takes values of at most {most} bytes",
        hint="Compute less in one statement, or read the longer values by another statement.",
    )


def _allows(op: int, a: str | None, b: str | None) -> bool:
    if op in _HARMLESS or (op == apsw.SQLITE_PRAGMA and a in _READ_PRAGMAS and b is None):
        return True
    if op in _DENIED or (op == apsw.SQLITE_FUNCTION and (b or "").lower() in BAD_FUNCTIONS):
        return False
    if op == apsw.SQLITE_CREATE_VTABLE and (b or "").lower() in _BAD_MODULES:
        return False
    return not any((name or "").lower().startswith(OURS) for name in (a, b))


def harden(db: apsw.Connection) -> None:
    """Remove features from a connection that callers' SQL must never use, independent of the authorizer.

    TRUSTED_SCHEMA remains on: otherwise applications' views that call snippet(), bm25() or median() would fail, and
    the authorizer denies harmful functions in views, too.
    """
    db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)  # only SQLite itself may write shadow tables and the schema
    db.config(apsw.SQLITE_DBCONFIG_ENABLE_FTS3_TOKENIZER, 0)
    modules = [str(name) for (name,) in db.execute("SELECT name FROM temp.pragma_module_list")]
    db.drop_modules([name for name in modules if name not in _BAD_MODULES])


def _is_of_rows(sql: str) -> bool:
    """Return whether the first word of a statement that SQLite has accepted is one that reads or writes rows."""
    word = _FIRST_WORD.match(sql)
    return word is not None and word[1].upper() in _ROW_STATEMENTS


def _refuse_trigger_names(sql: str) -> None:
    """Raise InvalidRequest for our trigger names: the authorizer cannot distinguish them from names of WITH."""
    if found := OUR_TRIGGER.search(sql):
        raise InvalidRequest(
            f"{found[0]!r} is the name of a trigger of Headwater", hint="If the text is data, bind it as an argument."
        )
