"""Analyses of one database: made by the engine and the parser together, and held only while the schema stands still."""

from __future__ import annotations

import threading

from headwater.model.dependency import Analysis, Dependency
from headwater.model.literal import Value
from headwater.sources.source import Look, Read
from headwater.sources.sqlite.analysis.engine import Facts, epoch_of, facts_of, schema_version, volatility
from headwater.sources.sqlite.opening import Connected
from headwater.sources.sqlite.session import run_statement

MAX_EPOCHS = 10_000


class Analyses:
    """One per source; from any thread, each call with a reader of its own inside a read transaction."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._version = -1
        self._epochs: dict[tuple[str, ...], str] = {}

    def look(self, reader: Connected) -> Look:
        """See Source."""
        return Look(reader.offset(), schema_version(reader))

    def analyse(self, reader: Connected, sql: str) -> Analysis:
        """See Source."""
        facts = facts_of(reader, sql)
        return Analysis(
            sql=sql,
            parameters=facts.parameters,
            columns=tuple(column.name for column in facts.statement.columns),
            tables=facts.tables,
            objects=facts.objects,
            dependencies=_whole_tables(facts),
            epoch=self._epoch(reader, facts.objects),
            volatile=volatility(reader, facts),
            doubts=("the statement was not read closer",),
        )

    def answer(self, reader: Connected, analysis: Analysis, args: dict[str, Value]) -> Read | None:
        """See Source."""
        reader.catalog.look()
        if self._epoch(reader, analysis.objects) != analysis.epoch:
            return None
        bound = [args[name] for name in analysis.parameters]
        found = run_statement(reader.db, reader.guard, reader.catalog, analysis.sql, bound)
        return Read(found.columns, found.rows, reader.offset(), found.truncated)

    def _epoch(self, reader: Connected, objects: tuple[str, ...]) -> str:
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


def _whole_tables(facts: Facts) -> tuple[Dependency, ...]:
    return tuple(Dependency(name) for name in facts.tables)
