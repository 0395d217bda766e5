"""What a caller's statement may do: an authorizer for every prepare, and what the engine says of a statement."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator

import apsw
import msgspec

from headwater.errors import InvalidRequest
from headwater.sources.sqlite.connection import OURS, sqlite_errors

_DENIED = {
    apsw.SQLITE_TRANSACTION,
    apsw.SQLITE_SAVEPOINT,
    apsw.SQLITE_ATTACH,
    apsw.SQLITE_DETACH,
    apsw.SQLITE_PRAGMA,
    # The writer's connection is shared: nothing of one caller may stay on it for the next.
    apsw.SQLITE_CREATE_TEMP_INDEX,
    apsw.SQLITE_CREATE_TEMP_TABLE,
    apsw.SQLITE_CREATE_TEMP_TRIGGER,
    apsw.SQLITE_CREATE_TEMP_VIEW,
}
_SCHEMA = {
    apsw.SQLITE_CREATE_INDEX,
    apsw.SQLITE_CREATE_TABLE,
    apsw.SQLITE_CREATE_TRIGGER,
    apsw.SQLITE_CREATE_VIEW,
    apsw.SQLITE_CREATE_VTABLE,
    apsw.SQLITE_DROP_INDEX,
    apsw.SQLITE_DROP_TABLE,
    apsw.SQLITE_DROP_TRIGGER,
    apsw.SQLITE_DROP_VIEW,
    apsw.SQLITE_DROP_VTABLE,
    apsw.SQLITE_ALTER_TABLE,
}
_HARMLESS = {apsw.SQLITE_ANALYZE, apsw.SQLITE_REINDEX}  # without a name they mean every table, ours too
_READ_PRAGMAS = {"data_version", "page_size"}  # what FTS5, FTS4 and R-Tree ask for inside a caller's statement
OUR_TRIGGER = re.compile(OURS + r"\d+_[a-z_]+")
_NOTHING_MORE = re.compile(r"(?>\s|;|--[^\n]*|/\*.*?(?:\*/|\Z))*+", re.DOTALL)
MAX_LENGTH = 129 << 20  # of a value or row a caller's statement touches: old and new of 64 MiB fit a capture row
_STEPS = 50_000  # virtual machine steps between two looks at the clock: about a millisecond
_BAD_FUNCTIONS = {"load_extension"}

# Our own statements carry this mark, so that their cached forms can never be reached by a caller's text.
_MARK = f"/*{secrets.token_hex(8)}*/"


@functools.cache
def _marked(sql: str) -> str:
    return sql + _MARK


ANY_BINDINGS: apsw.Bindings = apsw._null_bindings  # type: ignore[attr-defined]  # what apsw.ext.query_info passes


class Access(msgspec.Struct, frozen=True):
    """What the authorizer is asked: the action, its two names, and the view or trigger it happens in."""

    op: int
    a: str | None
    b: str | None
    by: str | None


class Answer(msgspec.Struct, frozen=True):
    """A column of a statement's answer, and the table's column it comes from, if it does."""

    name: str
    declared: str | None
    table: str | None
    column: str | None


class Statement(msgspec.Struct, frozen=True):
    """What the engine says of one statement."""

    read_only: bool
    schema: bool  # changes the schema
    alters: str | None = None  # the table of an ALTER TABLE
    columns: tuple[Answer, ...] = ()
    parameters: tuple[str | None, ...] = ()  # by place; their names with the mark, None for a bare ?


class Guard:
    """Watches one connection. `own` statements pass; everything else is a caller's."""

    def __init__(self, db: apsw.Connection, seconds: float) -> None:
        self._db = db
        self._seconds = seconds
        self._deadline = math.inf
        db.set_progress_handler(lambda: time.monotonic() > self._deadline, _STEPS)
        self._ours = False
        self._dropping: str | None = None  # the table the statement drops: our triggers go with it
        self._seen: list[tuple[int, str | None, str | None]] = []  # schema changes the current statement makes
        self._known: dict[str, Statement] = {}
        self._noted: list[Access] | None = None  # what a statement that is being looked at asks for
        db.authorizer = self._authorize

    def run(self, sql: str, bindings: apsw.Bindings = ()) -> apsw.Cursor:
        """Run a statement of our own."""
        before, self._ours = self._ours, True
        try:
            return self._db.execute(_marked(sql), bindings)
        finally:
            self._ours = before

    @contextlib.contextmanager
    def own(self) -> Iterator[apsw.Connection]:
        """Inside, plain statements on the connection are ours (installing triggers, for instance)."""
        before, self._ours = self._ours, True
        try:
            yield self._db
        finally:
            self._ours = before

    @contextlib.contextmanager
    def limited(self, seconds: float | None = None) -> Iterator[Callable[[int], None]]:
        """Limit a caller's statement inside: its seconds, and the bytes of a value, which the yielded function sets."""
        seconds = self._seconds if seconds is None else seconds
        self._deadline = time.monotonic() + seconds
        before = self._db.limit(apsw.SQLITE_LIMIT_LENGTH, MAX_LENGTH)
        try:
            yield self._limit_length
        except apsw.InterruptError:
            if time.monotonic() < self._deadline:
                raise
            raise InvalidRequest(
                f"the statement ran longer than {seconds:g} seconds and was stopped",
                hint="Nothing of it was kept. Do it in smaller steps, or raise sqlite.statement_seconds.",
            ) from None
        finally:
            self._deadline = math.inf
            self._db.limit(apsw.SQLITE_LIMIT_LENGTH, before)

    def _limit_length(self, most: int) -> None:
        self._db.limit(apsw.SQLITE_LIMIT_LENGTH, min(most, MAX_LENGTH))

    def examine(self, sql: str) -> Statement:
        """Prepare `sql` without running it; refuse nonsense, several statements and what is denied."""
        found = self._known.get(sql)
        if found is None:
            found = self._prepare(sql)
            if len(self._known) >= 1_000:
                self._known.clear()
            self._known[sql] = found
        return found

    def accesses(self, sql: str) -> tuple[Statement, list[Access]]:
        """What the engine says of `sql`, and everything it asks leave for while it is prepared."""
        self._noted = []
        try:
            return self._prepare(sql), self._noted
        finally:
            self._noted = None

    def forget_statement(self) -> None:
        """A new statement begins: what the last one did counts no more."""
        self._seen, self._dropping = [], None

    def forget(self) -> None:
        """The schema moved: what was learned of statements may no longer hold."""
        self._known.clear()

    def _prepare(self, sql: str) -> Statement:
        _refuse_trigger_names(sql)
        cursor = self._db.cursor()
        seen: list[tuple[str, bool, tuple[Answer, ...], tuple[str | None, ...]]] = []

        def trace(found: apsw.Cursor, text: str, bindings: object) -> bool:
            if found.has_vdbe:
                columns = tuple(Answer(n, kind, table, column) for n, kind, _, table, column in found.description_full)
                seen.append((text, found.is_readonly, columns, tuple(found.bindings_names)))
            return False

        cursor.exec_trace = trace
        self.forget_statement()
        try:
            with sqlite_errors(), contextlib.suppress(apsw.ExecTraceAbort):
                cursor.execute(sql, ANY_BINDINGS, can_cache=False)
        finally:
            cursor.close()
        if not seen:
            raise InvalidRequest("there is no statement in the text", hint="Send one, such as SELECT 1.")
        text, read_only, columns, parameters = seen[0]
        if not _NOTHING_MORE.fullmatch(sql, sql.find(text) + len(text)):
            raise InvalidRequest("one statement at a time", hint="Send them one by one, or inside tx.begin/tx.commit.")
        alters = next((b for op, _, b in self._seen if op == apsw.SQLITE_ALTER_TABLE), None)
        return Statement(read_only, bool(self._seen), alters, columns, parameters)

    def _authorize(self, op: int, a: str | None, b: str | None, db: str | None, by: str | None) -> int:
        if self._noted is not None:
            self._noted.append(Access(op, a, b, by))
        if self._ours or (by and OUR_TRIGGER.fullmatch(by)):
            return apsw.SQLITE_OK
        if op in _SCHEMA:
            self._seen.append((op, a, b))
        if op == apsw.SQLITE_DROP_TABLE:
            self._dropping = a
        if op == apsw.SQLITE_DROP_TRIGGER and b is not None and b == self._dropping:
            return apsw.SQLITE_OK
        return apsw.SQLITE_OK if _allows(op, a, b) else apsw.SQLITE_DENY


def _allows(op: int, a: str | None, b: str | None) -> bool:
    if op in _HARMLESS or (op == apsw.SQLITE_PRAGMA and a in _READ_PRAGMAS and b is None):
        return True
    if op in _DENIED or (op == apsw.SQLITE_FUNCTION and (b or "").lower() in _BAD_FUNCTIONS):
        return False
    return not any((name or "").lower().startswith(OURS) for name in (a, b))


def _refuse_trigger_names(sql: str) -> None:
    """The authorizer cannot tell a trigger of ours from a WITH clause of the same name."""
    if found := OUR_TRIGGER.search(sql):
        raise InvalidRequest(
            f"{found[0]!r} is the name of a trigger of Headwater", hint="If it is data, bind it as an argument."
        )
