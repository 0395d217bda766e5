"""Protocols for query instances (a prepared query with arguments), through which feeds use queries.

Feeds and queries are on the same level and do not import each other:
`headwater.queries.dependencies.subscribed_instances` implements these protocols.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from headwater.model.change import Change
from headwater.model.dependencies.description import Reason
from headwater.model.principal import Principal, Reads
from headwater.model.query.query import AnswerHash

Args = list[Any] | dict[str, Any]  # Lits, by position or by name


class QueryInstance(Reads, Protocol):
    """A prepared query with its arguments, analysed for one version of the schema. Thread-safe."""

    key: Hashable  # equal for the same query with the same arguments in every version of the schema
    query_id: str  # of the prepared query
    db: str  # that the query reads
    url: str  # the path at which the result is available
    follows_all: bool  # every change of the database invalidates the instance: its dependencies are unknown
    prefix: str  # of the ETags; differs whenever the analysis differs, because such ETags do not compare
    head: int  # the offset of the analysis: after a later change of the schema the query must be analysed again

    def matters(self, change: Change) -> int | None:
        """Return the number of the first dependency that `change` matches; None if the result cannot change."""

    def reason(self, change: Change, dependency: int) -> Reason:
        """Return why `change` matches the dependency number `dependency`."""

    def tag(self, offset: int) -> str:
        """Return the ETag of the result as long as the last relevant change is at `offset`."""

    def offset_of(self, etag: str) -> int | None:
        """Return the offset in an ETag of this instance, in any result format; None for any other ETag."""

    def answer(self) -> AnswerHash | None:
        """Run the query now and return the hash of its result; None if results cannot be compared. Blocks."""

    @property
    def is_guarded(self) -> bool:
        """Return whether `steady` may find relevant changes that left the result unchanged. Cheap."""

    def steady(self, upto: int) -> int | None:
        """Return an offset since which the result is known to be unchanged until `upto` or later; None if unknown.

        Blocks until the log is read up to `upto`.
        """


class Routes(Protocol):
    """Finds the instances to which a change is relevant, at a cost independent of their number. Not thread-safe."""

    def add(self, instance: QueryInstance) -> None:
        """Route relevant changes to the key of `instance`; replaces an earlier instance with this key."""

    def remove(self, key: Hashable) -> None:
        """Route nothing to `key` any more; an unknown key is ignored."""

    def route(self, change: Change) -> list[tuple[Hashable, int]]:
        """Return the keys to which `change` is relevant, each with the number of the first matching dependency."""


class QueryInstances(Protocol):
    """Looks up query instances. Use it in the loop."""

    async def find(
        self, db: str | None, query_id: str, args: Args, *, who: Principal | None = None, strict: bool = True
    ) -> QueryInstance:
        """Return the instance, analysed for the current schema.

        Raises NotFound, also where the query reads data that `who` may not read, InvalidRequest, NotSupported where
        results have no ETag, and Forbidden where the role of `who` may not send such SQL. Without `strict`, for an
        instance that was found before, a query that cannot run any more because its tables were dropped is returned,
        too: every change of the schema is relevant to it.
        """

    def routes(self, db: str) -> Routes:
        """Return an empty router for instances of one database."""

    def hold(self, db: str, instance: QueryInstance, *, last: int | None = None, since: int | None = None) -> None:
        """Keep the ETag of `instance` canonical until `release`; `last` was its last relevant change up to `since`.

        Blocks until the changes after `since` are checked.
        """

    def release(self, db: str, key: Hashable) -> None:
        """Stop keeping the ETag of the instance `key` canonical."""

    def position(self, db: str, key: Hashable) -> tuple[str, int, int] | None:
        """Return the ETag prefix, the last relevant change and the last checked offset of an instance between `hold`
        and `release`; else None. May block."""
