"""Analyses of one database: made by the engine and the parser together, and held only while the schema stands still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from headwater.model.dependencies.dependency import MAX_KEYS, Analysis, Dependency, KeyGuard
from headwater.model.literal import Value
from headwater.model.table import Row
from headwater.sources.query import Read
from headwater.sources.read import Look
from headwater.sources.sqlite.capture.triggers import CAPTURE
from headwater.sources.sqlite.database_file import Connected
from headwater.sources.sqlite.query.analysis.authorizer_reads import (
    Facts,
    bare_rowids,
    beyond,
    epoch_of,
    facts_of,
    schema_version,
    unseen,
    volatility,
)
from headwater.sources.sqlite.query.analysis.planner_inputs import Planning
from headwater.sources.sqlite.query.analysis.select_analysis import Closer, look_closer
from headwater.sources.sqlite.query.statement_execution import run_statement
from headwater.sources.sqlite.query.syntax.lexer import Unsupported

MAX_EPOCHS = 10_000
UNNAMED = ""  # a table that may be read and has no name: no scope includes it
_GLANCE = f"SELECT (SELECT coalesce(max(seq), 0) FROM {CAPTURE}), (SELECT schema_version FROM pragma_schema_version)"
LEAST_SECONDS = 0.005  # that guards may take, however fast the answer was


class Analyses:
    """One per source; from any thread, each call with a reader of its own inside a read transaction.

    `vouched` is the version of the schema for which capture was last made to fit: under any other, rows may have
    changed without an offset.
    """

    def __init__(self, vouched: Callable[[], int]) -> None:
        self._vouched = vouched
        self._planning = Planning()
        self._plans_count = False  # for a query that was analysed: from then on a look tells of them, too
        self._lock = threading.Lock()  # guards what follows
        self._version = -1
        self._epochs: dict[tuple[str, ...], str] = {}

    def look(self, reader: Connected) -> Look:
        """See Source."""
        head, version = reader.offset(), schema_version(reader)
        plans = int(self._planning.inputs(reader), 16) if self._plans_count else 0
        return Look(head, version << 64 | plans, settled=version == self._vouched())

    def glance(self, reader: Connected) -> Look:
        """The same outside a transaction, by one statement where no plan counts."""
        if self._plans_count:
            reader.guard.run("BEGIN")
            try:
                return self.look(reader)
            finally:
                reader.guard.run("COMMIT")
        ((head, version),) = reader.guard.run(_GLANCE).fetchall()
        return Look(int(str(head)), int(str(version)) << 64, settled=version == self._vouched())

    def analyse(self, reader: Connected, sql: str) -> Analysis:
        """See Source."""
        found = _understood(reader, sql)
        return msgspec.structs.replace(found, epoch=self._epoch(reader, found))

    def answer(
        self, reader: Connected, analysis: Analysis, args: dict[str, Value], *, guards: bool = False
    ) -> Read | None:
        """See Source."""
        reader.catalog.look()
        if self._epoch(reader, analysis) != analysis.epoch:
            return None
        bound = [args[name] for name in analysis.parameters]
        started = time.monotonic()
        found = run_statement(reader.db, reader.guard, reader.catalog, analysis.sql, bound)
        took = time.monotonic() - started
        settled = schema_version(reader) == self._vouched()
        offset = reader.offset()
        keys = _keys(reader, analysis, bound, max(took, LEAST_SECONDS)) if guards else ()
        return Read(found.columns, found.rows, offset, found.truncated, settled, keys)

    def _epoch(self, reader: Connected, analysis: Analysis) -> str:
        found = self._definitions(reader, analysis.objects)
        if analysis.is_total or not analysis.is_cacheable:
            return found
        # Its values may be others by another plan, not only their order.
        self._plans_count = True
        return f"{found}-{self._planning.inputs(reader)}"

    def _definitions(self, reader: Connected, objects: tuple[str, ...]) -> str:
        version = schema_version(reader)
        with self._lock:
            if version != self._version or len(self._epochs) > MAX_EPOCHS:
                self._version, self._epochs = version, {}
            found = self._epochs.get(objects)
        if found is None:
            found = epoch_of(reader, objects)
            with self._lock:
                if version == self._version:
                    self._epochs[objects] = found
        return found


def _keys(
    reader: Connected, analysis: Analysis, bound: Sequence[Value], seconds: float
) -> tuple[tuple[Row, ...] | None, ...]:
    """What each guard selects. All of them together may double what the answer costs, no more."""
    found: list[tuple[Row, ...] | None] = [None] * len(analysis.guards)
    until = time.monotonic() + seconds
    for place, guard in enumerate(analysis.guards):
        if isinstance(guard, KeyGuard):
            try:
                left = until - time.monotonic()
                rows = run_statement(
                    reader.db, reader.guard, reader.catalog, guard.sql, bound, most=MAX_KEYS, seconds=left
                )
            except Exception:  # guards may be missing, the answer may not
                break
            found[place] = None if rows.truncated else rows.rows
    return tuple(found)


def _understood(reader: Connected, sql: str) -> Analysis:
    """All but the epoch."""
    facts = facts_of(reader, sql)
    whole = Analysis(
        sql=sql,
        parameters=facts.parameters,
        columns=tuple(column.name for column in facts.statement.columns),
        tables=facts.tables,
        beyond=beyond(facts),
        objects=facts.objects,
        dependencies=tuple(Dependency(name) for name in facts.tables),
        epoch="",
        volatile=(*volatility(reader, facts), *bare_rowids(reader, facts)),
        unseen=unseen(reader, facts),
    )
    try:
        return _narrowed(whole, look_closer(reader, sql, facts), facts, volatility(reader, facts))
    except Unsupported as error:
        doubt = str(error)
    except Exception as error:  # whatever goes wrong in reading the text: the engine's word alone is enough
        doubt = f"the statement was not understood ({type(error).__name__})"
    # SQLite expands the names inside a WINDOW that nothing uses and asks no authorizer about them: whether such a
    # statement prepares depends on tables that the analysis cannot name.
    unnamed = (UNNAMED,) if "window" in sql.lower() else ()
    return msgspec.structs.replace(whole, doubts=(doubt,), beyond=(*whole.beyond, *unnamed))


def _narrowed(whole: Analysis, closer: Closer, facts: Facts, volatile: tuple[str, ...]) -> Analysis:
    seen = {dependency.table for dependency in closer.dependencies}
    if not seen.issubset(facts.tables):
        raise Unsupported("it names a table or a view that SQLite does not read")
    unseen = tuple(Dependency(name) for name in facts.tables if name not in seen)
    return msgspec.structs.replace(
        whole,
        sql=closer.sql,
        dependencies=closer.dependencies + unseen,
        is_total=closer.is_total,
        # No name of the statement is such a rowid, whatever SQLite looks at on its way.
        volatile=volatile,
        key=closer.key,
        guards=closer.guards,
        doubts=closer.doubts,
    )
