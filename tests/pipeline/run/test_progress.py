"""The meta store on every supported database: tasks, progress, and leases that two runs never share."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec.structs import replace
from tests.suite.deadlines import PATIENCE

from headwater.errors import ConfigError, NotFound, NotOwner, PipelineError, Unavailable
from headwater.model.keys.key import Span
from headwater.model.table import Column, Table
from headwater.pipeline.run.meta_database import META, PROGRESS, SUBSCRIBE, VERSION, MetaDatabase
from headwater.pipeline.run.ownership import LeaseRenewal, owner_name, release, renew, take
from headwater.pipeline.run.progress import Ledger, MetaStore
from headwater.pipeline.run.spec import PipelineSpec, SinkSpec, TableSpec
from headwater.pipeline.run.task import FAILED, LOG, SNAPSHOT, RangeProgress, Task
from headwater.pipeline.sinks.sink import Plan, State

pytest_plugins = ("tests.pipeline.servers",)

SINK = SinkSpec("delta", {"path": "lake/orders"})
ORDERS = TableSpec("orders", SINK)
SPEC = PipelineSpec((ORDERS,), "lake")
LONG = 3600.0  # seconds: a lease that does not expire during a test
PAST = -1.0  # seconds: one that has expired already
TABLE = Table("orders", (Column("id", "i64"), Column("what", "str")), ("id",))
ROWS = [
    RangeProgress(1, 2, Span(b"", b"\x11k"), LOG, 100, 110, b"", 130, rows=50, rows_estimate=49),
    RangeProgress(2, 2, Span(b"\x11k", None), SNAPSHOT, 100, 115, b"\x11m\xff", 0, rows=3, rows_estimate=60),
]


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "meta.db")
    return str(request.getfixturevalue(f"{request.param}_database"))


@pytest.fixture
def meta(url: str) -> Iterator[MetaStore]:
    with MetaStore.open(url) as store:
        yield store


@pytest.fixture
def lite(tmp_path: Path) -> Iterator[MetaStore]:
    """Yield a meta store in SQLite, for tests that do not depend on the database."""
    with MetaStore.open(str(tmp_path / "meta.db")) as store:
        yield store


def only(meta: MetaStore) -> Task:
    (task,) = meta.tasks()
    return task


# --- tables ----------------------------------------------------------------------------------------------


def test_meta_store_tables_have_the_documented_columns_and_keys() -> None:
    assert [column.name for column in SUBSCRIBE.primary_key] == [
        "cluster_id",
        "db_name",
        "table_name",
        "subscribe_name",
    ]
    assert {"db_id", "table_id", "master_addrs", "sink", "cancel", "owner"} <= set(SUBSCRIBE.c.keys())
    assert [column.name for column in PROGRESS.primary_key] == ["db_name", "table_name", "subscribe_name", "range_id"]
    assert set(PROGRESS.c.keys()) >= {
        "progress_stage",
        "progress_init_snapshot_version",
        "progress_current_snapshot_version",
        "progress_last_snapshot_key",
        "progress_last_log_index",
    }


def test_meta_store_opened_twice_keeps_its_subscriptions(url: str) -> None:
    with MetaStore.open(url) as first:
        first.subscribe(SPEC, ORDERS)
    with MetaStore.open(url) as second:
        assert only(second).table == "orders"


def test_meta_store_of_a_newer_version_is_refused(meta: MetaStore, url: str) -> None:
    with meta.database.transaction() as connection:
        connection.execute(sa.update(META).values(version=VERSION + 1))
    with pytest.raises(PipelineError, match=f"tables of version {VERSION + 1}, this Headwater knows {VERSION}"):
        MetaStore.open(url)


def test_meta_store_opened_by_six_threads_at_once_is_created_once(url: str) -> None:
    start, found = threading.Barrier(6), []

    def make() -> None:
        start.wait()
        with MetaStore.open(url) as store:
            found.append(store.subscribe(SPEC, ORDERS))

    at_once([make] * 6)
    assert [task.table for task in found] == ["orders"] * 6


def at_once(works: list[Any]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("text", ["oracle://x/y", "mongodb://x", "://", "sqlite+nothing:///x"])
def test_meta_store_with_an_unsupported_url_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MetaStore.open(text)
    assert "mariadb://" in caught.value.hint


def test_unreachable_meta_database_raises_unavailable_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="is not available") as caught:
        MetaStore.open(f"postgresql://me:hidden@/x?host={tmp_path}&password=hidden&sslpassword=hidden")
    assert "hidden" not in str(caught.value)


# --- tasks -----------------------------------------------------------------------------------------------


def test_second_subscribe_keeps_the_cancel_and_updates_the_server(meta: MetaStore) -> None:
    first = meta.subscribe(SPEC, ORDERS)
    meta.cancel("lake")
    moved = replace(first, cancelled=True, server="http://other:1", updated_ms=0)
    again = meta.subscribe(PipelineSpec((ORDERS,), "lake", "http://other:1"), ORDERS)
    assert replace(again, updated_ms=0) == moved
    assert (first.name, first.db, first.table, first.sink) == ("lake", "main", "orders", "delta path=lake/orders")
    assert not first.is_owned and first.verified_through is None


def test_meta_store_keeps_names_that_differ_only_in_case_separate(meta: MetaStore) -> None:
    for name in ("orders", "ORDERS", "Ordérs", "🌊"):
        meta.subscribe(SPEC, TableSpec(name, SINK))
    assert {task.table for task in meta.tasks("lake")} == {"orders", "ORDERS", "Ordérs", "🌊"}
    assert meta.tasks("LAKE") == []


def test_table_name_too_long_for_a_key_is_refused(lite: MetaStore) -> None:
    with pytest.raises(ConfigError, match="name of the table has 191 characters"):
        lite.subscribe(SPEC, TableSpec("x" * 191, SINK))


def test_longest_allowed_names_are_stored(meta: MetaStore) -> None:
    task = meta.subscribe(PipelineSpec((), "🌊" * 64), TableSpec("🌊" * 190, SINK, "🌊" * 64))
    meta.save(task, ROWS, take(meta, task, "me", LONG))
    assert meta.progress(task) == ROWS


def test_cancel_stops_one_table_or_a_whole_pipeline_and_can_be_undone(meta: MetaStore) -> None:
    orders, customers = (meta.subscribe(SPEC, TableSpec(name, SINK)) for name in ("orders", "customers"))
    other = meta.subscribe(PipelineSpec((), "other"), ORDERS)
    assert meta.cancel("lake", table="orders") == 1
    assert [meta.is_cancelled(task) for task in (orders, customers, other)] == [True, False, False]
    assert meta.cancel("lake") == 2
    assert [meta.is_cancelled(task) for task in (orders, customers, other)] == [True, True, False]
    assert meta.cancel("lake", undo=True) == 2
    assert not meta.is_cancelled(orders)
    assert meta.cancel("nobody") == 0


# --- progress --------------------------------------------------------------------------------------------


def test_saved_progress_replaces_the_previous_rows_of_its_task_only(meta: MetaStore) -> None:
    task = meta.subscribe(SPEC, ORDERS)
    other = meta.subscribe(SPEC, TableSpec("other", SINK))
    fence = take(meta, task, "me", LONG)
    assert meta.progress(task) == []
    meta.save(other, ROWS[:1], take(meta, other, "me", LONG))
    meta.save(task, ROWS, fence)
    assert meta.progress(task) == ROWS
    meta.save(task, ROWS[1:], fence)
    assert meta.progress(task) == ROWS[1:]
    meta.save(task, [], fence)
    assert meta.progress(task) == [] and meta.progress(other) == ROWS[:1]


def test_progress_stage_is_stored_as_a_number_and_the_key_as_hexadecimal(meta: MetaStore) -> None:
    task = meta.subscribe(SPEC, ORDERS)
    meta.save(task, ROWS, take(meta, task, "me", LONG))
    with meta.database.transaction() as connection:
        found = connection.execute(sa.select(PROGRESS).where(PROGRESS.c.range_id == 2)).one()
    assert (found.progress_stage, found.progress_last_snapshot_key, found.end_key) == (1, "116dff", None)


def test_save_with_an_old_fence_is_refused(meta: MetaStore) -> None:
    task = meta.subscribe(SPEC, ORDERS)
    old = take(meta, task, "old", PAST)
    meta.save(task, ROWS, old)  # nobody took it yet
    new = take(meta, task, "new", LONG)
    with pytest.raises(NotOwner):
        meta.save(task, [], old)
    with pytest.raises(NotOwner):
        Ledger(meta, task, old).save(State(Plan("p", "g", 1, (), TABLE), 1))
    with pytest.raises(NotOwner):
        meta.fail(task, "too late", old)
    assert meta.progress(task) == ROWS and only(meta).error == "" and Ledger(meta, task).load() is None
    meta.save(task, ROWS[:1], new)


def test_task_shows_its_failure_until_its_lease_is_taken_again(meta: MetaStore) -> None:
    task = meta.subscribe(SPEC, ORDERS)
    meta.save(task, ROWS, take(meta, task, "me", LONG))
    meta.fail(task, "the disk is full")
    assert only(meta).error == "the disk is full"
    assert [(row.stage, row.reason) for row in meta.progress(task)] == [(FAILED, "the disk is full")] * 2
    take(meta, task, "me", LONG)
    assert only(meta).error == ""


def test_verified_offset_is_stored(meta: MetaStore) -> None:
    meta.verified(meta.subscribe(SPEC, ORDERS), 2**40)
    assert only(meta).verified_through == 2**40


def test_concurrent_saves_of_different_tables_all_succeed(meta: MetaStore) -> None:
    tasks = [meta.subscribe(SPEC, TableSpec(f"t{n}", SINK)) for n in range(4)]
    start, failed = threading.Barrier(len(tasks)), []

    def work(task: Task) -> None:
        fence = take(meta, task, task.table, LONG)
        start.wait()
        try:
            for n in range(15):
                meta.save(task, [replace(row, range_id=n * 10 + row.range_id) for row in ROWS], fence)
        except Unavailable as error:
            failed.append(error)

    at_once([lambda task=task: work(task) for task in tasks])  # type: ignore[misc]
    assert failed == []


# --- the ledger ------------------------------------------------------------------------------------------


def test_ledger_with_3000_spans_loads_the_saved_state(meta: MetaStore) -> None:
    spans = tuple(Span(bytes([n // 256, n % 256]), bytes([n // 256, n % 256, 1])) for n in range(3000))
    state = State(Plan("p1", "g1", 100, spans, TABLE), 100, {span: 100 + n for n, span in enumerate(spans)})
    task = meta.subscribe(SPEC, ORDERS)
    assert Ledger(meta, task).load() is None
    Ledger(meta, task).save(state)
    assert Ledger(meta, task).load() == state


def test_subscribe_to_another_sink_is_refused_until_reset(lite: MetaStore) -> None:
    Ledger(lite, lite.subscribe(SPEC, ORDERS)).save(State(Plan("p", "g", 1, (), TABLE), 1))
    elsewhere = TableSpec("orders", SinkSpec("delta", {"path": "elsewhere"}))
    with pytest.raises(PipelineError, match="into delta path=lake/orders, not into delta path=elsewhere"):
        lite.subscribe(SPEC, elsewhere)
    lite.reset("lake")
    assert lite.subscribe(SPEC, elsewhere).sink == "delta path=elsewhere"


# --- reset -----------------------------------------------------------------------------------------------


def test_reset_clears_the_task_and_requests_a_new_snapshot(meta: MetaStore) -> None:
    task = meta.subscribe(SPEC, ORDERS)
    fence = take(meta, task, "me", LONG)
    meta.save(task, ROWS, fence)
    Ledger(meta, task).save(State(Plan("p", "g", 1, (), TABLE), 1))
    meta.verified(task, 7)
    meta.fail(task, "broken")
    meta.cancel("lake")
    release(meta, task, "me", fence)
    assert not meta.is_reset(task)
    assert meta.reset("lake") == 1
    assert replace(only(meta), updated_ms=0) == replace(task, resnapshot=True, updated_ms=0)
    assert meta.progress(task) == [] and Ledger(meta, task).load() is None and meta.is_reset(task)
    meta.begun(task, take(meta, task, "me", LONG))
    assert not meta.is_reset(task)


def test_reset_of_a_table_keeps_the_progress_of_the_rest(lite: MetaStore) -> None:
    orders, customers = (lite.subscribe(SPEC, TableSpec(name, SINK)) for name in ("orders", "customers"))
    for task in (orders, customers):
        fence = take(lite, task, "me", LONG)
        lite.save(task, ROWS, fence)
        release(lite, task, "me", fence)
    assert lite.reset("lake", "main", "orders") == 1
    assert (lite.progress(orders), lite.progress(customers)) == ([], ROWS)
    assert lite.reset("nobody") == 0


def test_reset_of_an_owned_task_is_refused_and_forced_reset_fences_its_owner(meta: MetaStore) -> None:
    free, task = (meta.subscribe(SPEC, TableSpec(name, SINK)) for name in ("free", "orders"))
    fence = take(meta, task, "busy one", LONG)
    meta.save(task, ROWS, fence)
    with pytest.raises(NotOwner, match="worked on by busy one"):
        meta.reset("lake")
    assert meta.progress(task) == ROWS and not meta.is_reset(free)
    assert meta.reset("lake", force=True) == 2
    with pytest.raises(NotOwner):
        meta.save(task, ROWS, fence)
    with pytest.raises(NotOwner):
        renew(meta, task, "busy one", fence, LONG)
    assert meta.progress(task) == []


# --- leases ----------------------------------------------------------------------------------------------


def test_lease_that_is_free_own_or_expired_is_taken_with_a_higher_fence(meta: MetaStore) -> None:
    task = meta.subscribe(SPEC, ORDERS)
    fences = [take(meta, task, "a", LONG), take(meta, task, "a", LONG)]
    with pytest.raises(NotOwner, match=r"orders of lake is held by a for another 3[56]\d\d\.\d s"):
        take(meta, task, "b", LONG)
    found = only(meta)
    assert (found.owner, found.is_owned) == ("a", True) and 3500_000 < found.owner_left_ms <= 3600_000
    release(meta, task, "a", fences[-1])
    assert not only(meta).is_owned
    fences.append(take(meta, task, "b", PAST))
    assert not only(meta).is_owned
    fences.append(take(meta, task, "c", LONG))
    assert fences == [1, 2, 3, 4]


def test_only_the_newest_fence_can_renew_and_release(meta: MetaStore) -> None:
    task = meta.subscribe(SPEC, ORDERS)
    old = take(meta, task, "a", LONG)
    new = take(meta, task, "a", PAST)
    with pytest.raises(NotOwner):
        renew(meta, task, "a", old, LONG)
    renew(meta, task, "a", new, LONG)  # expired, but nobody else came
    release(meta, task, "a", old)
    assert only(meta).is_owned
    take(meta, replace(task), "a", PAST)
    take(meta, task, "b", LONG)
    with pytest.raises(NotOwner):
        renew(meta, task, "a", new, LONG)


def test_lease_on_an_unknown_task_raises_not_found(lite: MetaStore) -> None:
    with pytest.raises(NotFound):
        take(lite, Task("lake", "main", "nothing"), "a", LONG)


def _contend(url: str, name: str, rounds: int, found: Any) -> None:
    """Take the lease repeatedly; report it if another holder is seen while it is held."""
    with MetaStore.open(url) as meta:
        task = meta.tasks()[0]
        for _ in range(rounds):
            try:
                fence = take(meta, task, name, LONG)
            except NotOwner:
                continue
            meta.verified(task, fence)
            held = meta.tasks()[0]
            found.append((fence, held.owner == name and held.verified_through == fence))
            release(meta, task, name, fence)


def _contend_in_a_process(url: str, name: str, rounds: int, pipe: Any) -> None:
    found: list[tuple[int, bool]] = []
    _contend(url, name, rounds, found)
    pipe.send(found)
    pipe.close()


def test_concurrent_threads_never_hold_the_same_lease(meta: MetaStore, url: str) -> None:
    meta.subscribe(SPEC, ORDERS)
    found: list[tuple[int, bool]] = []
    at_once([lambda name=name: _contend(url, name, 15, found) for name in "abcd"])  # type: ignore[misc]
    assert found and all(alone for _, alone in found)
    assert len({fence for fence, _ in found}) == len(found)


def test_concurrent_processes_never_hold_the_same_lease(meta: MetaStore, url: str) -> None:
    meta.subscribe(SPEC, ORDERS)
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(2)]
    started = [
        spawn.Process(target=_contend_in_a_process, args=(url, f"p{n}", 30, send)) for n, (_, send) in enumerate(pipes)
    ]
    for process in started:
        process.start()
    found = [each for receive, _ in pipes for each in receive.recv()]
    for process, (receive, send) in zip(started, pipes, strict=True):
        process.join()
        receive.close()
        send.close()
    assert [process.exitcode for process in started] == [0, 0]
    assert found and all(alone for _, alone in found)
    assert len({fence for fence, _ in found}) == len(found)


def test_eight_owners_asking_at_once_get_a_single_lease(meta: MetaStore) -> None:
    task = meta.subscribe(SPEC, ORDERS)
    start, got, refused = threading.Barrier(8), [], []

    def ask(name: str) -> None:
        start.wait()
        try:
            got.append(take(meta, task, name, LONG))
        except NotOwner as error:
            refused.append(error)

    at_once([lambda n=n: ask(f"server {n}") for n in range(8)])  # type: ignore[misc]
    assert got == [1] and len(refused) == 7


def test_owner_names_are_unique() -> None:
    assert owner_name() != owner_name() and owner_name().count(":") == 2


# --- the heart -------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_heartbeat_takes_renews_and_releases_the_lease(lite: MetaStore) -> None:
    task, clock = lite.subscribe(SPEC, ORDERS), Clock()
    heart = LeaseRenewal(lite, task, "a", LONG, clock=clock)
    assert heart.fence == 1 and only(lite).owner == "a"
    with pytest.raises(NotOwner):
        LeaseRenewal(lite, task, "b", LONG)
    clock.now = LONG - 1
    assert heart.renew()
    clock.now = LONG + 1  # counted from the last renewal
    assert not heart.lost.is_set()
    heart.stop()
    assert only(lite).owner == ""


def test_heartbeat_reports_a_lease_taken_by_another_owner_as_lost(lite: MetaStore) -> None:
    task = lite.subscribe(SPEC, ORDERS)
    heart = LeaseRenewal(lite, task, "a", LONG)
    lite.reset("lake", force=True)
    LeaseRenewal(lite, task, "b", LONG).stop()
    assert not heart.renew() and heart.lost.is_set()
    heart.stop()


def test_heartbeat_thread_reports_a_reset_lease_as_lost(lite: MetaStore) -> None:
    task = lite.subscribe(SPEC, ORDERS)
    heart = LeaseRenewal(lite, task, "a", 0.3)
    lite.reset("lake", force=True)
    assert heart.lost.wait(PATIENCE)
    heart.stop()


def test_lease_is_lost_after_its_full_duration_without_an_answer_of_the_store(tmp_path: Path) -> None:
    meta, clock = MetaStore.open(str(tmp_path / "meta.db")), Clock()
    heart = LeaseRenewal(meta, meta.subscribe(SPEC, ORDERS), "a", LONG, clock=clock)
    meta.database = Broken()  # type: ignore[assignment]
    clock.now = LONG - 1
    assert heart.renew() and not heart.lost.is_set()
    clock.now = LONG
    assert heart.lost.is_set() and not heart.renew()  # also while a question hangs
    heart.stop()


class Broken:
    now = sa.literal(0)

    def transaction(self) -> Any:
        raise Unavailable("gone")


@pytest.mark.parametrize("name", ["postgres", "mariadb"])
def test_database_clock_of_a_lease_ignores_the_session_time_zone(request: pytest.FixtureRequest, name: str) -> None:
    database = MetaDatabase(request.getfixturevalue(f"{name}_database"))
    with database.transaction() as connection:
        zone = "SET TIME ZONE 'Asia/Tokyo'" if name == "postgres" else "SET time_zone = '+09:00'"
        here = connection.execute(sa.select(database.now)).scalar_one()
        connection.exec_driver_sql(zone)
        there = connection.execute(sa.select(database.now)).scalar_one()
    database.close()
    assert 0 <= there - here < 60_000
