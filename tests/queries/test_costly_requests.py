"""Costly requests: one scan for many tags, and no long work or wait for a thread in the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.queries.open_databases import Whole
from tests.suite.deadlines import PATIENCE

from headwater.config import FeedsConfig
from headwater.errors import NotFound
from headwater.model.principal import ADMIN, VIEWER, Principal, Scope
from headwater.queries import answers as answering_module
from headwater.queries import head_checks
from headwater.queries.answers import WATCH_AFTER, Answer, Answering, QueryCounters
from headwater.queries.dependencies import instance_versions
from headwater.queries.etag import query_etag as tags
from headwater.queries.etag.query_etag import QueryTag
from headwater.queries.prepared import PreparedQuery, query_id

SQL = "SELECT v FROM t WHERE k = ?"
PREPARED = PreparedQuery(query_id("main", SQL), "main", SQL)


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Whole]:
    with Whole(tmp_path) as made:
        made.run("CREATE TABLE t(k, v)")
        made.run("INSERT INTO t VALUES (1, 'a')")
        caught_up(made)
        yield made


def caught_up(whole: Whole) -> None:
    assert whole.database("main").capture.catch_up(PATIENCE)


def write(whole: Whole, count: int, *, key: int = 2) -> None:
    for number in range(count):
        whole.run(f"INSERT INTO t VALUES ({key}, {number})")
    caught_up(whole)


class CountingLog:
    """A log that records the thread and start of each scan."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self.scans: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def scan(self, *, after: int, upto: int | None = None) -> Any:
        self.scans.append((after, threading.get_ident()))
        return self._log.scan(after=after, upto=upto)


def opened(whole: Whole) -> Answering:
    return Answering(whole.database("main"), asyncio.to_thread, QueryCounters())


def counted(found: Answering) -> CountingLog:
    log = CountingLog(found.versions._log)
    found.versions._log = log  # type: ignore[assignment]
    return log


async def ask(found: Answering, *tags: str, arg: Any = 1) -> Answer:
    return await found.ask(PREPARED, [arg], format="rows_json", tags=tags)


async def prefix_of(found: Answering) -> str:
    return (await found.understood(PREPARED, [1]))[0].prefix("rows_json")


@contextmanager
def held(lock: Any) -> Iterator[Callable[[], bool]]:
    """Hold `lock` in another thread; the yielded function releases it, and returns whether it was held until then."""
    taken, let_go = threading.Event(), threading.Event()
    asked_to: list[bool] = []

    def hold() -> None:
        with lock:
            taken.set()
            asked_to.append(let_go.wait(PATIENCE))

    thread = threading.Thread(target=hold)

    def release() -> bool:
        let_go.set()
        thread.join()
        return asked_to[0]

    thread.start()
    assert taken.wait(PATIENCE)
    try:
        yield release
    finally:
        release()


# --- tags ------------------------------------------------------------------------------------------------


def test_many_stale_tags_cost_one_scan_of_the_log(whole: Whole) -> None:
    first = whole.database("main").log.latest
    write(whole, 20)
    write(whole, 1, key=1)

    async def work() -> None:
        found = opened(whole)
        prefix, log = await prefix_of(found), counted(found)
        given = [QueryTag(prefix, first + number).write()[1:-1] for number in range(20)] * 5
        assert (await ask(found, *given)).read is not None
        assert [after for after, _ in log.scans] == [first + 19], "the newest of them"

    asyncio.run(work())


def test_newest_of_many_tags_is_found_current(whole: Whole) -> None:
    write(whole, 1, key=1)
    mattered = whole.database("main").log.latest
    write(whole, 5)

    async def work() -> None:
        found = opened(whole)
        prefix = await prefix_of(found)
        offsets = [mattered - 1, mattered + 2, mattered, mattered + 1_000]
        answer = await ask(found, "x", *(QueryTag(prefix, offset).write()[1:-1] for offset in offsets))
        assert answer.not_modified and answer.offset == mattered + 2
        assert answer.matched == QueryTag(prefix, mattered + 2).write()[1:-1]
        assert (await ask(found, QueryTag(prefix, mattered - 1).write()[1:-1])).read is not None

    asyncio.run(work())


@pytest.mark.parametrize(("most", "is_in_loop"), [(100, True), (3, False)])
def test_long_scan_runs_in_a_thread(whole: Whole, monkeypatch: pytest.MonkeyPatch, most: int, is_in_loop: bool) -> None:
    monkeypatch.setattr(answering_module, "MAX_BEHIND", most)
    first = whole.database("main").log.latest
    write(whole, 10)

    async def work() -> None:
        found = opened(whole)
        prefix, log = await prefix_of(found), counted(found)
        assert (await ask(found, QueryTag(prefix, first).write()[1:-1])).not_modified
        ((after, thread),) = log.scans
        assert after == first and (thread == threading.get_ident()) is is_in_loop

    asyncio.run(work())


# --- large arguments -------------------------------------------------------------------------------------


def test_large_arguments_are_encoded_once_in_a_thread_and_not_kept(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, threads, real = "x" * 200_000, [], tags.encode_row
    whole.run(f"INSERT INTO t VALUES ('{large}', 'found')")
    caught_up(whole)

    def encode_row(row: tuple[Any, ...]) -> bytes:
        if large in row:
            threads.append(threading.get_ident())
        return real(row)

    monkeypatch.setattr(tags, "encode_row", encode_row)

    async def work() -> None:
        found = opened(whole)
        answer = await ask(found, arg=large)
        assert answer.read is not None and answer.read.rows == (("found",),) and answer.etag is not None
        assert len(threads) == 1 and threading.get_ident() not in threads
        tag = answer.etag.removeprefix("W/").strip('"')
        assert (await ask(found, tag, arg=large)).not_modified
        assert (await ask(found, tag, arg=large + "x")).read is not None
        assert len(found._instances) == 0

    asyncio.run(work())


def test_subscribed_instance_with_large_arguments_is_bound_once(whole: Whole) -> None:
    """Each binding scans the log for earlier relevant changes."""

    async def work() -> None:
        found = opened(whole)
        first, _ = await found.understood(PREPARED, ["x" * 200_000])
        found.hold(first)
        for _ in range(3):
            assert (await found.understood(PREPARED, ["x" * 200_000]))[0] is first
        found.release(first.key)
        assert (await found.understood(PREPARED, ["x" * 200_000]))[0] is not first
        assert found.versions.watching == 0

    asyncio.run(work())


# --- locks -----------------------------------------------------------------------------------------------


def test_query_is_executed_while_a_thread_locks_the_instance_versions(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_checks, "CATCH_UP_SECONDS", 0.01)

    async def work() -> None:
        found = opened(whole)
        for _ in range(WATCH_AFTER + 1):
            etag = (await ask(found)).etag
        assert etag is not None
        tag = etag.removeprefix("W/").strip('"')
        assert (await ask(found, tag)).not_modified
        with held(found.versions._lock) as release:
            answer = await ask(found, tag)
            assert answer.read is not None and answer.read.rows == (("a",),) and answer.etag is not None
            assert release(), "the loop waited for the lock"
        assert (await ask(found, tag)).not_modified

    asyncio.run(work())


def test_request_waits_for_locked_instance_versions_in_a_thread(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_checks, "CATCH_UP_SECONDS", PATIENCE)

    async def work() -> None:
        found = opened(whole)
        etag = (await ask(found)).etag
        assert etag is not None
        waits, real = asyncio.Event(), found._head_checks.catch_up

        async def catch_up(wait: Callable[[], object]) -> None:
            waits.set()
            await real(wait)

        monkeypatch.setattr(found._head_checks, "catch_up", catch_up)
        with held(found.versions._lock) as release:
            asked = asyncio.create_task(ask(found, etag.removeprefix("W/").strip('"')))
            await waits.wait()
            assert release() and (await asked).not_modified

    asyncio.run(work())


def test_event_loop_is_not_blocked_while_a_thread_locks_the_table_versions(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answering, "_read", Answering.read)  # which does not save the table versions

    async def work() -> None:
        in_thread = asyncio.Event()

        async def run(work: Callable[..., Any], *args: Any) -> Any:
            if work == found._tables_at:
                in_thread.set()
            return await asyncio.to_thread(work, *args)

        found = Answering(whole.database("main"), run, QueryCounters())
        await found.understood(PREPARED, [1])
        with held(found.tables._lock) as release:
            asked = asyncio.create_task(ask(found))
            await in_thread.wait()
            assert release()
            assert (await asked).seen == found.tables.at(["t"])

    asyncio.run(work())


def test_instance_is_forgotten_without_waiting_for_the_lock_of_a_thread(whole: Whole) -> None:
    async def work() -> None:
        found = opened(whole)
        instance, _ = await found.understood(PREPARED, [1])
        found.versions.watch(instance.key, instance.bound)
        with held(found.versions._lock) as release:
            found.versions.forget(instance.key)
            assert release(), "it waited for the lock"
        assert found.versions.last(instance.key) is None and found.versions.watching == 0
        found.versions.watch(instance.key, instance.bound)
        assert found.versions.last(instance.key) is not None, "what was forgotten before counts no more"

    asyncio.run(work())


def test_instance_watched_again_after_a_delayed_forget_stays_watched(whole: Whole) -> None:
    async def work() -> None:
        found = opened(whole)
        instance, _ = await found.understood(PREPARED, [1])
        found.versions.watch(instance.key, instance.bound)
        with held(found.versions._lock):
            found.versions.forget(instance.key)
        found.versions.watch(instance.key, instance.bound)
        found.versions.advance()
        assert found.versions.last(instance.key) is not None

    asyncio.run(work())


def test_loop_applies_fewer_changes_if_many_instances_are_watched(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = instance_versions.InstanceVersions(whole.database("main").source, whole.database("main").log)
    half = FeedsConfig().max_subscriptions // 2  # instances that one viewer may subscribe to
    assert instance_versions.LEAST_BEHIND * half <= instance_versions.ROUTED_AT_ONCE
    write(whole, instance_versions.LEAST_BEHIND + 1)
    with found.try_hold() as is_held:
        assert is_held
    monkeypatch.setattr(instance_versions, "ROUTED_AT_ONCE", 0)  # as if there were very many
    with found.try_hold() as is_held:
        assert not is_held
    found.advance()
    with found.try_hold() as is_held:
        assert is_held


def test_large_backlog_is_applied_in_a_thread(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_versions, "ROUTED_AT_ONCE", 0)
    monkeypatch.setattr(answering_module, "MAX_BEHIND", 0)

    async def work() -> None:
        found = opened(whole)
        etag, log = (await ask(found)).etag, counted(found)
        assert etag is not None
        write(whole, instance_versions.LEAST_BEHIND + 1)
        assert (await ask(found, etag.removeprefix("W/").strip('"'))).not_modified
        assert log.scans and threading.get_ident() not in {thread for _, thread in log.scans}

    asyncio.run(work())


# --- tenants ---------------------------------------------------------------------------------------------


def test_query_of_a_database_outside_the_scopes_is_not_found(whole: Whole) -> None:
    async def work() -> None:
        queries = whole.open_queries(asyncio.to_thread)
        kept = (await queries.prepare(ADMIN, SQL)).prepared
        other = Principal("other", VIEWER, (Scope("elsewhere"),))
        said = []
        for id in (kept.id, query_id("main", "SELECT 1")):
            with pytest.raises(NotFound) as error:
                queries.get(other, id)
            said.append((error.value.message, error.value.hint))
        assert said[0] == said[1]
        assert queries.get(Principal("mine", VIEWER, (Scope("main"),)), kept.id) == kept

    asyncio.run(work())
