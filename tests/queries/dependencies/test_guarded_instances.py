"""Guards of watched instances: changes that they suppress keep tags current, and no other relevant change does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.capture.captured_database import Running, running
from tests.queries.open_databases import Whole
from tests.suite.deadlines import PATIENCE

from headwater.errors import OffsetExpired
from headwater.model.dependencies.dependency import Analysis
from headwater.queries.answers import WATCH_AFTER, Answering, QueryCounters
from headwater.queries.dependencies import guarded_instances
from headwater.queries.dependencies.bound_dependencies import BoundDependencies, bind
from headwater.queries.dependencies.guards import GuardState
from headwater.queries.dependencies.instance_versions import InstanceVersions
from headwater.queries.dependencies.instances import Instance
from headwater.queries.prepared import PreparedQuery, query_id
from headwater.sources.query import ReadResult
from headwater.sources.sqlite.query.analysis import analysis as analyse
from headwater.sources.sqlite.source import SqliteSource

SQL = "SELECT o.id, c.name FROM orders o JOIN customers c ON c.id = o.customer WHERE o.region = ? ORDER BY o.id"
SETUP = [
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, region TEXT)",
    "CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT)",
    "INSERT INTO customers VALUES (1, 'ann'), (2, 'bob'), (3, 'cy')",
    "INSERT INTO orders VALUES (10, 1, 'a'), (11, 2, 'b')",
]
INSIDE = "UPDATE customers SET name = name || '!' WHERE id = 1"  # of the answer for 'a'
OUTSIDE = "UPDATE customers SET name = name || '!' WHERE id = 3"  # matters by its dependencies, and is in no answer


class Shop:
    """A captured database, and one watched instance of a join."""

    def __init__(self, app: Running) -> None:
        self.app = app
        for sql in SETUP:
            app.run(sql)
        app.caught_up()
        self.analysis = app.source.analyse(SQL)
        self.args = {"1": "a"}
        self.tables = app.source.describe()
        self.bound = self.bind()
        self.versions = InstanceVersions(app.source, app.log)
        self.versions.watch("mine", self.bound)

    def bind(self) -> BoundDependencies:
        return bind(self.app.source, self.tables, self.analysis, self.args)

    def read(self) -> tuple[ReadResult, GuardState]:
        read = self.app.source.answer(self.analysis, self.args, guards=True)
        assert read is not None
        made = GuardState.record(self.app.source, self.tables, self.analysis, self.args, self.bound, read)
        return read, made

    def guard(self) -> int:
        """Read the answer with its guards, and return its offset."""
        read, state = self.read()
        self.versions.guard("mine", self.bound, state, read.offset)
        return read.offset

    def write(self, sql: str) -> int:
        offset = self.app.run(sql)
        self.app.caught_up()
        return offset

    def is_current(self, offset: int) -> bool:
        self.versions.advance()
        return self.versions.is_current("mine", self.bound, offset)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with running(tmp_path) as app:
        yield Shop(app)


def test_tag_stays_current_over_changes_that_guards_suppress(shop: Shop) -> None:
    tag = shop.guard()
    moved = shop.write(OUTSIDE)
    assert shop.is_current(tag)
    assert shop.versions.last("mine") == (moved, moved), "what matters is what the dependencies say"
    assert shop.versions.guarded.suppressed == shop.versions.allowed == 1
    assert shop.is_current(moved) and shop.versions.allowed == 1
    assert shop.versions.steady("mine", shop.bound, moved) == tag
    changed = shop.write(INSIDE)
    assert not shop.is_current(tag) and not shop.is_current(moved) and shop.is_current(changed)
    later = shop.write(OUTSIDE)
    assert not shop.is_current(changed), "they are gone until the next answer"
    assert shop.versions.steady("mine", shop.bound, later) == later


def test_without_guards_every_relevant_change_makes_tags_stale(shop: Shop) -> None:
    tag = shop.app.source.head()
    shop.write(OUTSIDE)
    assert not shop.is_current(tag)


def test_new_answer_does_not_make_older_tags_current(shop: Shop) -> None:
    tag = shop.guard()
    shop.write(INSIDE)
    again = shop.guard()
    shop.write(OUTSIDE)
    assert not shop.is_current(tag) and shop.is_current(again)


def test_tag_stays_current_after_a_new_answer_and_suppressed_changes(shop: Shop) -> None:
    tag = shop.guard()
    shop.write(OUTSIDE)
    shop.guard()
    shop.write(OUTSIDE)
    assert shop.is_current(tag)


def test_guards_do_not_suppress_changes_before_their_answer(shop: Shop) -> None:
    """The log is behind the source: these changes are applied after the guards were recorded."""
    tag = shop.app.source.head()
    shop.versions.advance()
    real = shop.versions.advance
    shop.versions.advance = lambda: 0  # type: ignore[method-assign]
    shop.write(OUTSIDE)
    seen = shop.guard()
    shop.versions.advance = real  # type: ignore[method-assign]
    assert not shop.is_current(tag) and shop.is_current(seen)
    shop.write(OUTSIDE)
    assert shop.is_current(seen), "but over what comes after"


def test_guards_are_not_stored_after_a_later_relevant_change(shop: Shop) -> None:
    read, state = shop.read()
    shop.write(OUTSIDE)
    shop.versions.guard("mine", shop.bound, state, read.offset)
    assert len(shop.versions.guarded) == 0
    shop.write("CREATE TABLE other (id)")
    read, state = shop.read()
    shop.write("INSERT INTO other VALUES (1)")  # what does not matter does no harm
    shop.versions.guard("mine", shop.bound, state, read.offset)
    assert len(shop.versions.guarded) == 1


def test_instance_with_another_analysis_is_not_the_watched_one(shop: Shop) -> None:
    read, state = shop.read()
    shop.versions.guard("mine", shop.bind(), state, read.offset)
    assert len(shop.versions.guarded) == 0
    shop.versions.guard("mine", shop.bound, state, read.offset)
    moved = shop.write(OUTSIDE)
    assert shop.is_current(read.offset)
    assert not shop.versions.is_current("mine", shop.bind(), read.offset)
    assert shop.versions.steady("mine", shop.bind(), moved) is None


def _forget(shop: Shop) -> None:
    shop.versions.forget("mine")


def _watch_again(shop: Shop) -> None:
    shop.versions.watch("mine", shop.bound)


def _new_generation(shop: Shop) -> None:
    shop.app.log.restart(first=shop.app.log.latest + 2, reason="a test")


def _trimmed(shop: Shop) -> None:
    def expired(upto: int) -> None:
        raise OffsetExpired(0, 1, upto)

    shop.versions._apply = expired  # type: ignore[method-assign]
    shop.write("INSERT INTO orders VALUES (99, 3, 'z')")


def _schema_change(shop: Shop) -> None:
    shop.write("ALTER TABLE customers ADD COLUMN more TEXT")


@pytest.mark.parametrize("ends", [_forget, _watch_again, _new_generation, _trimmed, _schema_change])
def test_guards_are_dropped_after_a_forget_trim_new_generation_or_schema_change(
    shop: Shop, ends: Callable[[Shop], None]
) -> None:
    shop.guard()
    assert len(shop.versions.guarded) == 1
    ends(shop)
    shop.versions.advance()
    assert len(shop.versions.guarded) == 0 and shop.versions.guarded._keys == 0


def test_number_of_guarded_instances_and_of_their_keys_is_limited(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_instances, "MAX_GUARDED", 2)
    for key in "abc":
        shop.versions.watch(key, shop.bound)
        read, state = shop.read()
        shop.versions.guard(key, shop.bound, state, read.offset)
    held = shop.versions.guarded
    assert [key in held for key in "abc"] == [False, True, True]
    monkeypatch.setattr(guarded_instances, "MAX_HELD_KEYS", 1)
    shop.guard()
    assert "mine" in held and len(held) == 1 and held._keys == 1


def test_guards_checked_against_too_many_changes_in_one_pass_are_dropped(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_instances, "MAX_ASKED", 3)
    tag = shop.guard()
    for _ in range(5):
        shop.write(OUTSIDE)
        assert shop.is_current(tag)
    for _ in range(4):
        shop.write(OUTSIDE)
    assert not shop.is_current(tag) and len(shop.versions.guarded) == 0


def test_steady_is_unknown_while_too_many_changes_are_not_applied(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.guard()
    shop.write(OUTSIDE)
    moved = shop.write(OUTSIDE)
    monkeypatch.setattr("headwater.queries.dependencies.instance_versions.MAX_SCAN", 1)
    assert shop.versions.steady("mine", shop.bound, moved) is None
    assert shop.versions.is_guarded("mine")


# --- reading them ----------------------------------------------------------------------------------------


def test_answer_read_with_guards_has_the_keys_that_its_guards_need(shop: Shop) -> None:
    read, _ = shop.read()
    assert read.rows == ((10, "ann"),) and read.keys == (((1,),),)
    plain = shop.app.source.answer(shop.analysis, shop.args)
    assert plain is not None and plain.keys == ()


def test_guard_with_more_keys_than_the_limit_is_not_recorded(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyse, "MAX_KEYS", 2)
    for id in (2, 3):
        assert shop.read()[0].keys[0] is not None
        shop.write(f"INSERT INTO orders VALUES ({20 + id}, {id}, 'a')")
    read, state = shop.read()
    assert len(read.rows) == 3 and read.keys == (None,) and not state


def test_answer_has_rows_and_no_keys_if_the_keys_query_of_its_guard_fails(shop: Shop) -> None:
    broken = _with_keys(shop.analysis, "SELECT nothing FROM orders WHERE ?1 IS ?1")
    read = shop.app.source.answer(broken, shop.args, guards=True)
    assert read is not None and read.rows == ((10, "ann"),) and read.keys == (None,)


def test_answer_has_rows_and_no_keys_if_the_keys_query_of_its_guard_takes_too_long(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyse, "LEAST_SECONDS", 0.05)
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n WHERE ?1 IS ?1"
    read = shop.app.source.answer(_with_keys(shop.analysis, endless), shop.args, guards=True)
    assert read is not None and read.rows == ((10, "ann"),) and read.keys == (None,)


def _with_keys(analysis: Analysis, sql: str) -> Analysis:
    (guard,) = analysis.guards
    return msgspec.structs.replace(analysis, guards=(msgspec.structs.replace(guard, sql=sql),))


# --- who pays for them -----------------------------------------------------------------------------------


async def _in_place(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Whole]:
    with Whole(tmp_path) as made:
        for sql in SETUP:
            made.run(sql)
        assert made.database("main").capture.catch_up(PATIENCE)
        yield made


def test_only_often_requested_or_subscribed_instances_have_guards(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[bool] = []
    real = SqliteSource.answer

    def answer(source: SqliteSource, *given: Any, guards: bool = False) -> ReadResult | None:
        wanted.append(guards)
        return real(source, *given, guards=guards)

    monkeypatch.setattr(SqliteSource, "answer", answer)
    prepared = PreparedQuery(query_id("main", SQL), "main", SQL)

    async def work() -> None:
        answering = Answering(whole.database("main"), _in_place, QueryCounters())
        for _ in range(WATCH_AFTER + 2):
            await answering.ask(prepared, ["a"], format="rows_json")
        assert not any(wanted), "who never comes back with a tag has no use for them"
        await answering.ask(prepared, ["c"], format="rows_json", tags=["x"])
        assert not any(wanted)
        for _ in range(2):
            await answering.ask(prepared, ["a"], format="rows_json", tags=["x"])
        assert wanted[-2:] == [True, False], "what is guarded need not be guarded again"
        other, _ = await answering.understood(prepared, ["b"])
        answering.hold(other)
        await answering.ask(prepared, ["b"], format="rows_json")
        assert wanted[-1] and len(answering.versions.guarded) == 2
        answering.release(other.key)
        assert len(answering.versions.guarded) == 1

    asyncio.run(work())


def test_query_whose_guards_have_too_many_keys_is_read_without_guards_after_three_times(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analyse, "MAX_KEYS", 0)
    prepared = PreparedQuery(query_id("main", SQL), "main", SQL)

    async def work() -> None:
        answering = Answering(whole.database("main"), _in_place, QueryCounters())
        instance, _ = await answering.understood(prepared, ["a"])
        answering.hold(instance)
        keys = [bool(found.keys) for _ in range(5) if (found := answering.read(instance)) is not None]
        assert keys == [True, True, True, False, False]

    asyncio.run(work())


def test_outdated_instance_is_not_watched_after_its_answer(whole: Whole) -> None:
    """The read took long, and the query was analysed again concurrently: other changes are relevant now."""
    prepared = PreparedQuery(query_id("main", SQL), "main", SQL)

    async def work() -> None:
        answering = Answering(whole.database("main"), _in_place, QueryCounters())
        old, _ = await answering.understood(prepared, ["a"])
        old.asked = WATCH_AFTER
        made = Instance(
            prepared, old.analysis, old.args, old.bound, tables={}, generation=old.generation, schema=old.schema
        )
        answering._instances.put(made)
        await answering._execute(old)
        answering._position(old, 0)
        assert answering.versions.watching == 0

    asyncio.run(work())
