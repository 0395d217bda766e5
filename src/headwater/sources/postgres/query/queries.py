"""SQL of callers on a PostgreSQL database: checks, reads, and answers to analysed queries."""

from __future__ import annotations

from headwater.model.dependencies.dependency import Analysis
from headwater.model.literal import Value
from headwater.model.principal import OWNER
from headwater.model.query.query import Query
from headwater.sources.postgres.protocol_session import Link
from headwater.sources.postgres.query.analysis.analysis import Analyses
from headwater.sources.postgres.query.caller_connections import Callers
from headwater.sources.postgres.query.query_sql import query_sql
from headwater.sources.postgres.query.statement_rules import check_ours, examine, run_statement
from headwater.sources.postgres.snapshot_visibility import SnapshotOffsets, read_with_offset
from headwater.sources.query import Args, ReadResult
from headwater.sources.write import Result


class PostgresQueries:
    """The SQL queries of a source. Fulfils the part of `Queryable` that is not `Readable`."""

    def __init__(self, callers: Callers, analyses: Analyses, offsets: SnapshotOffsets, *, seconds: float) -> None:
        self._callers, self._analyses, self._offsets, self._seconds = callers, analyses, offsets, seconds

    def check_sql(self, role: str, statement: str = "", args: Args = ()) -> None:
        self._callers.check(role, statement, args)

    def is_read_only(self, sql: str, args: Args = (), *, role: str = OWNER) -> bool:
        """Return whether PostgreSQL's plan of `sql` writes nothing."""
        # The time limit applies because PostgreSQL computes constants of the statement, which may take long.
        pool = self._callers.pool(role)
        return pool.read(lambda link: examine(link, sql, args or None)[0].read_only, self._seconds)

    def read(self, sql: str, args: Args = (), *, role: str = OWNER) -> ReadResult:
        """Run a statement in a read-only transaction; InvalidRequest if it writes or uses Headwater's tables."""

        def read(link: Link) -> Result:
            statement, bound = examine(link, sql, args)
            result = run_statement(link, statement, bound)
            check_ours(link)
            return result

        result, offset = read_with_offset(self._callers.pool(role), self._offsets, read, self._seconds)
        return ReadResult(result.columns, result.rows, offset, result.truncated)

    def text(self, query: Query) -> str:
        return query_sql(query)

    def analyse(self, sql: str) -> Analysis:
        return self._analyses.analyse(sql)

    def answer(self, analysis: Analysis, args: dict[str, Value], *, guards: bool = False) -> ReadResult | None:
        """Run the query; None if its epoch has changed. `guards` has no effect: analyses of PostgreSQL have none."""
        return self._analyses.answer(analysis, args)
