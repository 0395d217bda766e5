"""Analyses of queries on one database, by the engine and the parser together; epochs are cached per schema version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from headwater.model.dependencies.dependency import MAX_KEYS, Analysis, Dependency, KeyGuard
from headwater.model.literal import Value
from headwater.model.table import Row
from headwater.sources.query import ReadResult
from headwater.sources.read import SourceHead
from headwater.sources.sqlite.capture.triggers import CAPTURE
from headwater.sources.sqlite.database_file import GuardedConnection
from headwater.sources.sqlite.query.analysis.authorizer_reads import (
    StatementFacts,
    beyond,
    epoch_of,
    facts_of,
    schema_version,
    uncaptured_rowids,
    unseen,
    volatility,
)
from headwater.sources.sqlite.query.analysis.planner_inputs import PlannerInputs
from headwater.sources.sqlite.query.analysis.select_analysis import analyse_select, without_names_of_with
from headwater.sources.sqlite.query.statement_execution import run_statement
from headwater.sources.sqlite.query.syntax.lexer import NotAnalysed

MAX_EPOCHS = 10_000
UNNAMED = ""  # name for a table that cannot be named: no scope includes it
_READ_HEAD = f"SELECT (SELECT coalesce(max(seq), 0) FROM {CAPTURE}), (SELECT * FROM temp.pragma_schema_version)"
LEAST_SECONDS = 0.005  # minimum time allowed for guards, however fast the answer was


class Analyses:
    """Analyser of one source's queries. Thread-safe: each caller passes its own reader, inside a read transaction.

    `vouched` returns the schema version for which capture was last reconciled: under any other version, rows may have
    changed without an offset.
    """

    def __init__(self, vouched: Callable[[], int]) -> None:
        self._vouched = vouched
        self._planning = PlannerInputs()
        # Set once an analysed query depends on its plan; from then on `read_head` includes the planner inputs.
        self._plans_count = False
        self._lock = threading.Lock()  # guards _version and _epochs
        self._version = -1
        self._epochs: dict[tuple[str, ...], str] = {}

    def read_head(self, reader: GuardedConnection) -> SourceHead:
        """Return the head of the database, read in the transaction of `reader`."""
        head, version = reader.offset(), schema_version(reader)
        plans = int(self._planning.inputs(reader), 16) if self._plans_count else 0
        return SourceHead(head, version << 64 | plans, settled=version == self._vouched())

    def peek_head(self, reader: GuardedConnection) -> SourceHead:
        """Return the head from outside a transaction, with one statement where no query depends on its plan."""
        if self._plans_count:
            reader.guard.run("BEGIN")
            try:
                return self.read_head(reader)
            finally:
                reader.guard.run("COMMIT")
        ((head, version),) = reader.guard.run(_READ_HEAD).fetchall()
        return SourceHead(int(str(head)), int(str(version)) << 64, settled=version == self._vouched())

    def analyse(self, reader: GuardedConnection, sql: str) -> Analysis:
        """Return the dependencies of one read-only statement; see Queryable."""
        found = _understood(reader, sql)
        return msgspec.structs.replace(found, epoch=self._epoch(reader, found))

    def answer(
        self, reader: GuardedConnection, analysis: Analysis, args: dict[str, Value], *, guards: bool = False
    ) -> ReadResult | None:
        """Run an analysed query; None if its epoch has changed. See Queryable."""
        reader.catalog.refresh_unless_held()
        if self._epoch(reader, analysis) != analysis.epoch:
            return None
        bound = [args[name] for name in analysis.parameters]
        started = time.monotonic()
        found = run_statement(reader, analysis.sql, bound)
        took = time.monotonic() - started
        settled = schema_version(reader) == self._vouched()
        offset = reader.offset()
        keys = _keys(reader, analysis, bound, max(took, LEAST_SECONDS)) if guards else ()
        return ReadResult(found.columns, found.rows, offset, found.truncated, settled, keys)

    def _epoch(self, reader: GuardedConnection, analysis: Analysis) -> str:
        found = self._definitions(reader, analysis.objects)
        if analysis.is_total or not analysis.is_cacheable:
            return found
        # Another query plan may give other values, not only another order.
        self._plans_count = True
        return f"{found}-{self._planning.inputs(reader)}"

    def _definitions(self, reader: GuardedConnection, objects: tuple[str, ...]) -> str:
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
    reader: GuardedConnection, analysis: Analysis, bound: Sequence[Value], seconds: float
) -> tuple[tuple[Row, ...] | None, ...]:
    """Return the rows that each guard selects; None if it has no statement, too many rows, or no time is left."""
    found: list[tuple[Row, ...] | None] = [None] * len(analysis.guards)
    until = time.monotonic() + seconds
    for place, guard in enumerate(analysis.guards):
        if isinstance(guard, KeyGuard):
            try:
                left = until - time.monotonic()
                rows = run_statement(reader, guard.sql, bound, most=MAX_KEYS, seconds=left)
            except Exception:  # guards are optional, the answer is not
                break
            found[place] = None if rows.truncated else rows.rows
    return tuple(found)


def _understood(reader: GuardedConnection, sql: str) -> Analysis:
    """Return the analysis of `sql` without its epoch."""
    facts = facts_of(reader, sql)
    try:
        stored = without_names_of_with(reader, sql, facts)
        return analyse_select(reader, _whole(reader, sql, stored), stored)
    except NotAnalysed as error:
        doubt = str(error)
    except Exception as error:  # no failure of our parser is an error: the report of the engine is enough
        doubt = f"the statement was not understood ({type(error).__name__})"
    whole = _whole(reader, sql, facts)
    # The report of the engine is not exact enough to judge scopes by: inside an unused WINDOW it expands names without
    # calling the authorizer, it leaves out a compound view whose rows count(*) counts, and it reports names of WITH
    # like tables and views. Whether a statement is refused must not depend on what else has such a name.
    is_inexact = "window" in sql.lower() or "with" in sql.lower() or "count" in facts.functions
    unnamed = (UNNAMED,) if is_inexact else ()
    return msgspec.structs.replace(whole, doubts=(doubt,), beyond=(*whole.beyond, *unnamed))


def _whole(reader: GuardedConnection, sql: str, facts: StatementFacts) -> Analysis:
    """Return the analysis in which every row of the tables counts."""
    return Analysis(
        sql=sql,
        parameters=facts.parameters,
        columns=tuple(column.name for column in facts.statement.columns),
        tables=facts.tables,
        beyond=beyond(reader, facts),
        objects=facts.objects,
        dependencies=tuple(Dependency(name) for name in facts.tables),
        epoch="",
        volatile=(*volatility(reader, facts), *uncaptured_rowids(reader, facts)),
        unseen=unseen(reader, facts),
    )
