"""The answers of a server for an instance: its own path from an execution to a 304, over a log that the kit fills."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from tests.log.memory_log import MemoryLog

from headwater.errors import HeadwaterError
from headwater.model.change import Transaction
from headwater.model.dependencies.dependency import Analysis
from headwater.model.table import Table
from headwater.queries.answers import Answering, QueryCounters
from headwater.queries.dependencies.bound_dependencies import BoundDependencies
from headwater.queries.dependencies.instances import Instance
from headwater.queries.prepared import PreparedQuery, query_id
from headwater.sources.query import ReadResult
from headwater.sources.sqlite.source import SqliteSource

COLD = 4  # every so manieth instance is not watched


class _Slow:
    """The source; it may return an answer that was begun earlier."""

    def __init__(self, source: SqliteSource) -> None:
        self._source = source
        self.begun: ReadResult | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def answer(self, analysis: Analysis, args: dict[str, Any], *, guards: bool = False) -> ReadResult | None:
        begun, self.begun = self.begun, None
        return begun or self._source.answer(analysis, args, guards=guards)


class _Database:
    """A database as `headwater.queries.database` defines it, in which nothing waits."""

    def __init__(self, source: _Slow, log: MemoryLog) -> None:
        self.source, self.log = source, log


class Product:
    """The answering of one database, without an event loop."""

    def __init__(self, source: SqliteSource) -> None:
        self.log = MemoryLog()
        self._source = _Slow(source)
        database: Any = _Database(self._source, self.log)
        run: Any = None
        self._answering = Answering(database, run, QueryCounters())
        self.versions = self._answering.versions
        self._known: dict[int, Instance] = {}

    def append(self, parts: list[Transaction]) -> None:
        """Append captured transactions to the log; `advance` applies them."""
        self.log.append(parts)

    def prepare(
        self,
        number: int,
        sql: str,
        analysis: Analysis,
        args: dict[str, Any],
        bound: BoundDependencies,
        tables: Mapping[str, Table],
    ) -> None:
        """Register an instance with its current analysis; most are watched, as if requested often."""
        self.forget(number)
        prepared = PreparedQuery(f"{query_id('app', sql)}{number}", "app", sql)
        made = Instance(prepared, analysis, args, bound, tables=tables, generation=self.log.generation, schema=0)
        self._known[number] = made
        if number % COLD < COLD - 1:
            self._answering.hold(made)

    def forget(self, number: int) -> None:
        """Forget an instance: its analysis is no longer valid."""
        gone = self._known.pop(number, None)
        if gone is not None:
            self._answering.release(gone.key)

    def ask(self, number: int, begun: ReadResult | None = None) -> bool:
        """Request the answer, which is `begun` if given; return whether guards are held then."""
        if (asked := self._known.get(number)) is None:
            return False
        self._source.begun = begun
        with contextlib.suppress(HeadwaterError):
            self._answering.read(asked)
        return asked.key in self.versions.guarded

    def begin(self, number: int) -> ReadResult | None:
        """Return an answer that `ask` may return later."""
        if (asked := self._known.get(number)) is None:
            return None
        with contextlib.suppress(HeadwaterError):
            return self._source.answer(asked.analysis, asked.args, guards=True)
        return None

    def is_current(self, number: int, offset: int) -> bool:
        """Return whether a tag of this offset would be answered by 304."""
        asked = self._known[number]
        return self.versions.is_current(asked.key, asked.bound, offset)
