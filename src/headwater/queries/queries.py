"""Prepare, explain and execute queries, over every database of this server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol, runtime_checkable

import msgspec

from headwater.database import Databases
from headwater.errors import Forbidden, InvalidRequest
from headwater.model.database_name import real_name
from headwater.model.dependencies.dependency import Analysis
from headwater.model.principal import OWNER, Principal
from headwater.model.query.query import check_length
from headwater.queries.answers import Answer, Answering, QueryCounters
from headwater.queries.dependencies.instance_versions import InstanceVersions
from headwater.queries.dependencies.instances import Args
from headwater.queries.etag.causality import Token
from headwater.queries.head_checks import Run
from headwater.queries.missing_names import no_table
from headwater.queries.patch.recent_results import Results
from headwater.queries.prepared import PreparedQueries, PreparedQuery, query_id, unknown_query
from headwater.queries.sql_normal_form import check_text, normal_form

MAX_CHECKED = 10_000
NORMALISED_AT_ONCE = 8 << 10  # characters of a query that the event loop normalises itself


class TransientQuery(PreparedQuery, frozen=True):
    """A query that a caller sent as text: it may be stored under its id or not."""


class Explanation(msgspec.Struct, frozen=True):
    """A query and its analysis."""

    prepared: PreparedQuery
    analysis: Analysis


@runtime_checkable
class Prepares(Protocol):
    """Databases that store prepared queries."""

    def open_queries(self, run: Run) -> Queries:
        """Return the query service of all databases, bound to the running event loop."""


class Queries:
    """Prepares and answers the queries of a server. Create it in the loop; `run` runs blocking work in a thread."""

    def __init__(
        self, databases: Databases, prepared: PreparedQueries, run: Run, *, sample: int = 0, public: bool = False
    ) -> None:
        self._databases, self._prepared, self.run, self._sample = databases, prepared, run, sample
        self.public = public  # whether shared caches may keep answers
        self._answering: dict[str, Answering] = {}
        self._checked: set[tuple[str, str]] = set()  # (query id, role) pairs whose SQL that role may send
        self.numbers = QueryCounters()
        self.results = Results()

    async def prepare(
        self,
        principal: Principal,
        sql: str,
        *,
        db: str | None = None,
        form: bytes | None = None,
        name: str | None = None,
    ) -> Explanation:
        """Store a query under an id derived from its text; InvalidRequest if `sql` is not a query."""
        found = await self.explain(principal, sql, db=db)
        made, role = found.prepared, principal.role
        kept = await self.run(lambda: self._prepared.add(made.db, made.sql, form=form, name=name, role=role))
        return Explanation(kept, found.analysis)

    async def explain(self, principal: Principal, sql: str, *, db: str | None = None) -> Explanation:
        """Analyse a query without storing it; raise Forbidden if the caller may not send it."""
        made = await self._transient(sql, db)
        principal.check_any_scope(made.db)
        source = self._databases.database(made.db).source
        source.check_sql(principal.role)
        with principal.understanding(made.db):
            async with self._naming_tables(principal, made.db):
                found: Analysis = await self.run(source.analyse, made.sql)
        principal.check_reads(made.db, found)
        if found.calls:
            principal.need(OWNER, f"a query with the volatile function {found.calls[0]}()")
        return Explanation(made, found)

    async def explain_prepared(self, principal: Principal, id: str) -> Explanation:
        """Return a stored query and its current analysis; raise as `allow` does."""
        found = self.get(principal, id)
        await self.allow(principal, found)
        async with self._naming_tables(principal, found.db):
            analysis = await self.answering(found.db).meaning(found)
        return Explanation(await self._transient(found.sql, found.db), analysis)

    async def _transient(self, sql: str, db: str | None) -> TransientQuery:
        """Return `transient_query`; of a long text in a thread, because normalising it would block the event loop."""
        if len(sql) <= NORMALISED_AT_ONCE:
            return transient_query(sql, db)
        found: TransientQuery = await self.run(transient_query, sql, db)
        return found

    def get(self, principal: Principal, id: str) -> PreparedQuery:
        """Return the query with this id; NotFound if it is unknown or its database is outside the caller's scopes."""
        found = self._prepared.get(id)
        if not principal.sees(found.db):
            raise unknown_query()
        return found

    async def ask(
        self,
        principal: Principal,
        prepared: PreparedQuery,
        args: Args,
        *,
        format: str,
        tags: Sequence[str] = (),
        floor: Token | None = None,
    ) -> Answer:
        """Return the answer of a query, or an answer without rows if one of the client's `tags` is current."""
        await self.allow(principal, prepared)
        async with self._naming_tables(principal, prepared.db):
            found = await self.answering(prepared.db).ask(prepared, args, format=format, tags=tags, floor=floor)
        check_reads(principal, prepared, found.instance.analysis)  # the schema may have changed since `allow`
        return found

    @asynccontextmanager
    async def _naming_tables(self, principal: Principal, db: str) -> AsyncIterator[None]:
        """Add to errors about a missing table the name that the caller probably meant."""
        try:
            yield
        except InvalidRequest as error:
            if not error.missing_table:
                raise
            tables = await self.run(self._databases.database(db).source.describe)
            raise no_table(error, principal, db, tables) from None

    async def allow(self, principal: Principal, prepared: PreparedQuery) -> None:
        """Raise Forbidden if a query reads tables outside the caller's scopes, or its role must not send such SQL.

        A stored query is unknown to a caller restricted to tables that must not run it (see `_hidden_as_unknown`).
        """
        principal.check_any_scope(prepared.db)
        answering = self.answering(prepared.db)
        with _hidden_as_unknown(principal, prepared):
            if principal.role != OWNER:
                await self._check_text(principal, prepared)
            if principal.tables(prepared.db) is not None:
                with principal.understanding(prepared.db):
                    found = await answering.meaning(prepared)
                principal.check_reads(prepared.db, found)

    async def _check_text(self, principal: Principal, prepared: PreparedQuery) -> None:
        """Raise Forbidden unless the caller, or the highest role that prepared the query, may send its SQL."""
        if prepared.role:
            self._databases.database(prepared.db).source.check_sql(prepared.role)
        elif (prepared.id, principal.role) not in self._checked:
            await self.explain(principal, prepared.sql, db=prepared.db)
            if len(self._checked) >= MAX_CHECKED:
                self._checked.clear()
            self._checked.add((prepared.id, principal.role))

    def answering(self, db: str) -> Answering:
        """Return the object that answers queries of `db`; NotFound if there is no such database."""
        database = self._databases.database(db)
        found = self._answering.get(db)
        if found is None or found.database is not database:  # dropped and created again
            found = self._answering[db] = Answering(database, self.run, self.numbers, sample=self._sample)
        return found

    def dropped(self, db: str) -> None:
        """Delete the queries of a database that was dropped."""
        self._answering.pop(db, None)
        self._prepared.drop_database(db)

    def close(self) -> None:
        """Save state that is slow to compute again; call it after the last request."""
        for answering in self._answering.values():
            answering.close()

    @property
    def kept(self) -> int:
        """Return the number of prepared queries."""
        return self._prepared.count

    def versions(self) -> Mapping[str, InstanceVersions]:
        """Return the tracked instances by database."""
        return {db: found.versions for db, found in list(self._answering.items())}


def check_reads(principal: Principal, prepared: PreparedQuery, analysis: Analysis) -> None:
    """Raise the error of `Queries.allow` if the query, analysed again, reads tables outside the caller's scopes."""
    with _hidden_as_unknown(principal, prepared):
        principal.check_reads(prepared.db, analysis)


@contextmanager
def _hidden_as_unknown(principal: Principal, prepared: PreparedQuery) -> Iterator[None]:
    """Turn Forbidden into NotFound if the query is stored and the caller is restricted to tables.

    The id of a query is derived from its text: another error than for an unknown id would reveal that somebody
    prepared this text.
    """
    try:
        yield
    except Forbidden:
        if isinstance(prepared, TransientQuery) or principal.tables(prepared.db) is None:
            raise
        raise unknown_query() from None


def transient_query(sql: str, db: str | None) -> TransientQuery:
    """Return a query with its normalised text and id, without storing it; InvalidRequest if it is too long."""
    check_length(len(sql))
    check_text(sql, "query")
    name, text = real_name(db), normal_form(sql)
    return TransientQuery(query_id(name, text), name, text)
