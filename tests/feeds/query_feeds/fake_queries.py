"""Fake query instances: the test defines their relevant changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from tests.feeds.feed_database import Fed

from headwater.feeds.options import Options
from headwater.feeds.query_feeds.query_groups import InstanceGroups
from headwater.feeds.query_feeds.query_view import QueryView
from headwater.model.change import Change, Op
from headwater.model.dependencies.description import Reason
from headwater.model.query.query import AnswerHash
from headwater.model.table import Row

Holds = Callable[[Row], bool]


class Fake:
    """An instance that depends on the rows of one table for which `holds` is true, and on the schema."""

    query_id, db, url = "q_fake", "main", "/api/v1/q/q_fake"
    beyond: tuple[str, ...] = ()
    dependencies: tuple[Any, ...] = ()
    follows_all = False

    def __init__(
        self, table: str = "items", holds: Holds = lambda row: True, *, key: Hashable = 0, head: int = 0
    ) -> None:
        self.tables, self.holds, self.key, self.head, self.prefix = (table,), holds, key, head, f"p{key}"
        self.answers: list[AnswerHash | None] = []
        self.steady_from: int | None = None
        self.asked = 0

    def matters(self, change: Change) -> int | None:
        self.asked += 1
        if change.table.name not in self.tables:
            return None
        if change.op in (Op.SCHEMA_CHANGE, Op.TRUNCATE):
            return 0
        return 0 if any(row is not None and self.holds(row) for row in (change.before, change.after)) else None

    def reason(self, change: Change, place: int) -> Reason:
        return Reason(change.table.name, None, f"place {place}")

    def tag(self, offset: int) -> str:
        return f'"{self.prefix}.{offset:x}"'

    def offset_of(self, etag: str) -> int | None:
        return None

    def answer(self) -> AnswerHash | None:
        return self.answers.pop(0)

    @property
    def is_guarded(self) -> bool:
        return self.steady_from is not None

    def steady(self, upto: int) -> int | None:
        return self.steady_from


class FakeRoutes:
    """Asks every instance for every change, and counts the changes."""

    def __init__(self) -> None:
        self.held: dict[Hashable, Any] = {}
        self.routed = 0

    def add(self, instance: Any) -> None:
        self.held[instance.key] = instance

    def remove(self, key: Hashable) -> None:
        self.held.pop(key, None)

    def route(self, change: Change) -> list[tuple[Hashable, int]]:
        self.routed += 1
        found = [(key, instance.matters(change)) for key, instance in self.held.items()]
        return [(key, place) for key, place in found if place is not None]


def groups(*known: Fake) -> InstanceGroups:
    """Groups for a hub; `find` returns the instance whose key is the query id of the options."""
    by_id = {str(one.key): one for one in known}

    async def find(options: Options) -> Any:
        return by_id[options.query_id]

    return InstanceGroups(FakeRoutes(), find)


def options(instance: Fake, **given: Any) -> Options:
    return Options(db="main", **{"query_id": str(instance.key), "format": "plain_json", **given})


def view(fed: Fed, instance: Fake, **given: Any) -> QueryView:
    return QueryView(options(instance, **given), fed.source, instance)
