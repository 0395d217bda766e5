"""SQL of callers on a SQLite file: checks, reads, and results of analysed queries."""

from __future__ import annotations

from headwater.model.dependencies.dependency import Analysis
from headwater.model.literal import Value
from headwater.model.principal import OWNER
from headwater.model.query.query import Query
from headwater.sources.query import Args, ReadResult
from headwater.sources.read import SourceHead
from headwater.sources.request_checks import rows_only
from headwater.sources.sqlite.connection_pool import Pool
from headwater.sources.sqlite.database_file import File
from headwater.sources.sqlite.file_head import HeadReader
from headwater.sources.sqlite.query.analysis.analysis import Analyses
from headwater.sources.sqlite.query.query_sql import query_sql
from headwater.sources.sqlite.query.statement_execution import run_statement


class SqliteQueries:
    """Implementation of the part of `Queryable` that does not read tables."""

    def __init__(self, file: File, pool: Pool, analyses: Analyses) -> None:
        self._pool, self._analyses, self._head_reader = pool, analyses, HeadReader(file, analyses)
        self.stop_statements = file.is_stopping.set

    def check_sql(self, role: str, statement: str = "", args: Args = ()) -> None:
        """Raise Forbidden unless the caller is an owner or sends a SELECT, INSERT, UPDATE or DELETE.

        The authorizer restricts everything else.
        """
        if statement and role != OWNER:
            with self._pool.read() as reader:
                reader.catalog.refresh_unless_held()
                found = reader.guard.examine(statement)
                if found.schema or not found.rows:
                    raise rows_only()

    def is_read_only(self, sql: str, args: Args = (), *, role: str = OWNER) -> bool:
        """Return whether SQLite itself reports that `sql` writes nothing."""
        with self._pool.read() as reader:
            reader.catalog.refresh_unless_held()
            return reader.guard.examine(sql).read_only

    def read(self, sql: str, args: Args = (), *, role: str = OWNER) -> ReadResult:
        """Run one read-only statement; return its rows with the offset of the read."""
        with self._pool.read() as reader:
            reader.catalog.refresh_unless_held()
            result = run_statement(reader, sql, args)
            return ReadResult(result.columns, result.rows, reader.offset(), result.truncated)

    def read_head(self) -> SourceHead:
        """Return the newest offset and the schema number of the file, read in one transaction."""
        with self._pool.read() as reader:
            return self._analyses.read_head(reader)

    def peek_head(self) -> SourceHead | None:
        """Return the head of the file; None if another thread reads it now, or the file is locked."""
        return self._head_reader.read()

    def text(self, query: Query) -> str:
        return query_sql(query)

    def analyse(self, sql: str) -> Analysis:
        with self._pool.read() as reader:
            return self._analyses.analyse(reader, sql)

    def answer(self, analysis: Analysis, args: dict[str, Value], *, guards: bool = False) -> ReadResult | None:
        """Run the query and its guards if wanted; None if its epoch has changed."""
        with self._pool.read() as reader:
            return self._analyses.answer(reader, analysis, args, guards=guards)
