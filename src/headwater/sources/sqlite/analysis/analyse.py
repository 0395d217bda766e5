"""Analyses of one database: made by the engine and the parser together, and held only while the schema stands still."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from headwater.model.dependency import Analysis, Dependency
from headwater.model.literal import Value
from headwater.sources.source import Look, Read
from headwater.sources.sqlite.analysis.closer import Closer, look_closer
from headwater.sources.sqlite.analysis.engine import (
    Facts,
    bare_rowids,
    epoch_of,
    facts_of,
    schema_version,
    unseen,
    volatility,
)
from headwater.sources.sqlite.analysis.lexer import Unsupported
from headwater.sources.sqlite.opening import Connected
from headwater.sources.sqlite.session import run_statement

MAX_EPOCHS = 10_000


class Analyses:
    """One per source; from any thread, each call with a reader of its own inside a read transaction.

    `vouched` is the version of the schema for which capture was last made to fit: under any other, rows may have
    changed without an offset.
    """

    def __init__(self, vouched: Callable[[], int]) -> None:
        self._vouched = vouched
        self._lock = threading.Lock()  # guards what follows
        self._version = -1
        self._epochs: dict[tuple[str, ...], str] = {}

    def look(self, reader: Connected) -> Look:
        """See Source."""
        head, version = reader.offset(), schema_version(reader)
        return Look(head, version, settled=version == self._vouched())

    def analyse(self, reader: Connected, sql: str) -> Analysis:
        """See Source."""
        facts = facts_of(reader, sql)
        whole = Analysis(
            sql=sql,
            parameters=facts.parameters,
            columns=tuple(column.name for column in facts.statement.columns),
            tables=facts.tables,
            objects=facts.objects,
            dependencies=tuple(Dependency(name) for name in facts.tables),
            epoch=self._epoch(reader, facts.objects),
            volatile=(*volatility(reader, facts), *bare_rowids(reader, facts)),
            unseen=unseen(reader, facts),
        )
        try:
            return _narrowed(whole, look_closer(reader, sql, facts), facts, volatility(reader, facts))
        except Unsupported as error:
            return msgspec.structs.replace(whole, doubts=(str(error),))
        except Exception as error:
            # Whatever goes wrong in reading the text: the engine's word alone is enough.
            return msgspec.structs.replace(
                whole, doubts=(f"the statement was not understood ({type(error).__name__})",)
            )

    def answer(self, reader: Connected, analysis: Analysis, args: dict[str, Value]) -> Read | None:
        """See Source."""
        reader.catalog.look()
        if self._epoch(reader, analysis.objects) != analysis.epoch:
            return None
        bound = [args[name] for name in analysis.parameters]
        found = run_statement(reader.db, reader.guard, reader.catalog, analysis.sql, bound)
        settled = schema_version(reader) == self._vouched()
        return Read(found.columns, found.rows, reader.offset(), found.truncated, settled)

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


def _narrowed(whole: Analysis, closer: Closer, facts: Facts, volatile: tuple[str, ...]) -> Analysis:
    seen = {dependency.table for dependency in closer.dependencies}
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
