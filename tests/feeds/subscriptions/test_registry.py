"""The registry: acknowledged writes survive kill -9, failed writes change nothing, and callers share commits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from tests.feeds.feed_database import Fed, insert
from tests.log.faults import FaultyVFS
from tests.suite.deadlines import PATIENCE

from headwater.errors import (
    Conflict,
    HeadwaterError,
    InvalidRequest,
    LimitExceeded,
    LogDamaged,
    NotFound,
    StorageFull,
    Unavailable,
)
from headwater.feeds.options import Options, Shard
from headwater.feeds.subscription import END, SnapshotSpan, SnapshotState, Subscription
from headwater.feeds.subscription_requests import Subscriptions
from headwater.feeds.subscriptions import store
from headwater.feeds.subscriptions.registry import Registry
from headwater.feeds.subscriptions.store import InstancePosition
from headwater.feeds.subscriptions.subscribe_table import SubscribeTable
from headwater.model.principal import Principal, Scope

OWNER, ANN, BOB = Principal("root"), Principal("ann", "viewer"), Principal("bob", "viewer")
PLAIN = Options(db="main", tables=("t",))
RICH = Options(
    db="main",
    tables=("t",),
    ops=("delete", "insert"),
    pk_range={"lower_bound": {"t": "u64", "v": 2**64 - 1}},
    spans=[{"prefix": [{"t": "str", "v": "é"}]}],
    shard=Shard(1, 3),
    where="a > 'x'",
    columns=("a", "b"),
    after=True,
    format="debezium_json",
    txn="atomic",
)
ROOT = Path(__file__).parents[3]
FRESH = SnapshotState(tables=("t", "u"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "subscriptions.db"


@pytest.fixture
def opened(place: Path) -> Iterator[Callable[..., Registry]]:
    """Return a function that closes the open registry and opens the file again."""
    made: list[Registry] = []

    def reopen(**settings: Any) -> Registry:
        for one in made:
            one.close()
        made.append(Registry.open(place, **settings))
        return made[-1]

    yield reopen
    for one in made:
        one.close()


def everything(registry: Registry) -> list[Any]:
    return [plain(one) for one in registry.visible_to(OWNER)]


def plain(one: Subscription) -> Any:
    return msgspec.structs.asdict(one)


# --- durability ------------------------------------------------------------------------------------------


def test_everything_about_a_subscription_survives_a_restart(opened: Callable[..., Registry]) -> None:
    registry = opened(clock_ms=lambda: 1234)
    one, created = registry.create(ANN, RICH, acked=7, name="né\N{SNOWMAN}", snapshot=FRESH)
    assert created
    assert (one.id, one.owner, one.created_ms, one.cursor) == ("sub_0000000000000000", "ann", 1234, 7)
    registry.set_paused(one.id, True)
    registry.create(BOB, PLAIN, acked=0)
    before = everything(registry)
    assert everything(opened()) == before
    assert before[0]["paused"]
    assert before[0]["options"] == RICH
    assert before[0]["snapshot"] == FRESH


def test_positions_of_an_unopened_database_are_kept(opened: Callable[..., Registry]) -> None:
    registry = opened()
    main, shop = InstancePosition("q", "main", "p", 1, 2), InstancePosition("q", "shop", "p", 3, 4)
    registry.save_positions([main, shop])
    registry.save_positions([main], but={"shop"})
    assert registry.position("shop", "q") == shop
    registry.close()
    registry = opened()
    assert (registry.position("main", "q"), registry.position("shop", "q")) == (main, shop)
    registry.save_positions([main])
    assert registry.position("shop", "q") is None


def test_ids_are_never_reused(opened: Callable[..., Registry]) -> None:
    registry = opened()
    first, second = (registry.create(ANN, PLAIN, acked=0)[0].id for _ in range(2))
    registry.remove(second)
    third = opened().create(ANN, PLAIN, acked=0)[0].id
    assert [first, second, third] == [f"sub_{number:016x}" for number in range(3)]


def test_ack_only_moves_forward(opened: Callable[..., Registry]) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=5)[0].id
    assert registry.ack(id, 9).acked == 9
    assert registry.ack(id, 3).acked == 9
    assert opened().get(ANN, id).acked == 9


def test_older_ack_costs_no_commit(opened: Callable[..., Registry]) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=5)[0].id
    before = registry._commits.commits
    registry.ack(id, 5)
    assert registry._commits.commits == before


def test_seek_moves_both_ways(opened: Callable[..., Registry]) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=5)[0].id
    assert registry.seek(id, 20).cursor == 20
    assert registry.seek(id, 2).cursor == 2
    assert opened().get(ANN, id).cursor == 2


def test_paused_and_resumed_states_survive_a_restart(opened: Callable[..., Registry]) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=5)[0].id
    assert registry.set_paused(id, True).paused
    assert opened().get(ANN, id).paused
    registry = opened()
    assert not registry.set_paused(id, False).paused
    assert not opened().get(ANN, id).paused


def test_removed_subscription_is_unknown_to_every_call(opened: Callable[..., Registry]) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=5, name="n")[0].id
    registry.remove(id)
    calls: list[Callable[[], Any]] = [
        lambda: registry.get(OWNER, id),
        lambda: registry.ack(id, 9),
        lambda: registry.seek(id, 9),
        lambda: registry.set_paused(id, True),
        lambda: registry.set_paused(id, False),
        lambda: registry.save_snapshot(id, None),
        lambda: registry.remove(id),
    ]
    for call in calls:
        with pytest.raises(NotFound, match="unknown sub_id"):
            call()
    assert not registry.quiet(id, 9, after=0)
    assert everything(opened()) == []


def test_dropped_database_removes_its_subscriptions(opened: Callable[..., Registry]) -> None:
    registry = opened()
    registry.create(ANN, PLAIN, acked=0, snapshot=FRESH.read(offset=1, end=b"k", next_key=(1,)))
    kept = registry.create(ANN, Options(db="other"), acked=0)[0]
    assert registry.for_db("other") == [kept]
    registry.close_db("main")
    assert registry.for_db("main") == []
    assert [one["id"] for one in everything(opened())] == [kept.id]


# --- names and owners ------------------------------------------------------------------------------------


def test_create_with_an_existing_name_returns_the_same_subscription(opened: Callable[..., Registry]) -> None:
    registry = opened()
    one, _ = registry.create(ANN, RICH, acked=5, name="mine")
    registry.ack(one.id, 8)
    again, created = registry.create(ANN, RICH, acked=100, name="mine", snapshot=FRESH)
    assert (again, created) == (one, False)
    assert (one.acked, one.snapshot) == (8, None)
    registry = opened()
    again, created = registry.create(ANN, RICH, acked=100, name="mine")
    assert (again.id, created) == (one.id, False)


def test_name_with_other_options_or_owner_is_a_conflict(opened: Callable[..., Registry]) -> None:
    registry = opened()
    registry.create(ANN, PLAIN, acked=5, name="mine")
    with pytest.raises(Conflict, match="other options") as found:
        registry.create(ANN, RICH, acked=5, name="mine")
    assert "another name" in found.value.hint
    with pytest.raises(Conflict, match="taken"):
        registry.create(BOB, PLAIN, acked=5, name="mine")
    assert not registry.create(OWNER, PLAIN, acked=5, name="mine")[1]
    assert registry.create(BOB, Options(db="other"), acked=5, name="mine")[1]
    assert registry.create(ANN, PLAIN, acked=5)[1]
    assert registry.create(ANN, PLAIN, acked=5)[1]


def test_principal_sees_its_own_subscriptions_and_an_owner_sees_all(opened: Callable[..., Registry]) -> None:
    registry = opened()
    mine = registry.create(ANN, PLAIN, acked=0)[0]
    theirs = registry.create(BOB, Options(db="other"), acked=0)[0]
    assert registry.visible_to(ANN) == [mine]
    assert registry.visible_to(OWNER) == [mine, theirs]
    assert registry.visible_to(OWNER, "other") == [theirs]
    assert registry.visible_to(ANN, "other") == []
    assert registry.get(ANN, mine.id) is registry.get(OWNER, mine.id) is mine
    with pytest.raises(NotFound, match="unknown sub_id"):
        registry.get(ANN, theirs.id)


def test_scopes_are_looked_up_once_for_a_database_and_only_for_own_subscriptions(
    opened: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = opened()
    scoped = Principal("ann", "viewer", (Scope("main", ("t",)), Scope("more", ("t",))))
    asked, tables = [], Principal.tables

    def noted(who: Principal, db: str) -> frozenset[str] | None:
        asked.append(db)
        return tables(who, db)

    mine = [registry.create(ANN, Options(db=db, tables=("t",)), acked=0)[0] for db in ("main", "more", "main")]
    watched = [registry.create(ANN, Options(db="main", query_id=id), acked=0)[0] for id in ("q1", "q2", "q1")]
    registry.create(ANN, Options(db="main", tables=("t", "u")), acked=0)
    registry.create(BOB, Options(db="other", tables=("t",)), acked=0)
    registry.create(BOB, Options(db="main", query_id="q3"), acked=0)
    monkeypatch.setattr(Principal, "tables", noted)
    assert registry.visible_to(scoped) == mine + watched
    assert sorted(asked) == ["main", "more"]
    asked.clear()
    assert sorted(one.id for one in registry.queries_to_check(scoped)) == sorted(one.id for one in watched[:2])
    assert len(asked) <= 4
    assert registry.queries_to_check(ANN) == []


def test_subscription_above_the_maximum_is_refused_until_another_is_removed(opened: Callable[..., Registry]) -> None:
    registry = opened(most=2)
    one, _ = registry.create(OWNER, PLAIN, acked=0, name="a")
    registry.create(OWNER, PLAIN, acked=0)
    with pytest.raises(LimitExceeded):
        registry.create(OWNER, PLAIN, acked=0)
    assert not registry.create(OWNER, PLAIN, acked=0, name="a")[1]
    registry.remove(one.id)
    assert registry.create(OWNER, PLAIN, acked=0)[1]


def test_caller_without_the_owner_role_is_limited_to_half_of_max_subscriptions(opened: Callable[..., Registry]) -> None:
    registry = opened(most=5)
    one, _ = registry.create(ANN, PLAIN, acked=0, name="a")
    registry.create(ANN, Options(db="other"), acked=0)
    for restart in (False, True):
        registry = opened(most=5) if restart else registry
        with pytest.raises(
            LimitExceeded, match="'ann' has reached the limit of 2 subscriptions of one caller"
        ) as caught:
            registry.create(ANN, PLAIN, acked=0)
        assert "feeds.max_subscriptions" in caught.value.hint
        assert not registry.create(ANN, PLAIN, acked=0, name="a")[1]
    assert registry.create(BOB, PLAIN, acked=0)[1]
    registry.remove(one.id)
    assert registry.create(ANN, PLAIN, acked=0)[1]
    for _ in range(2):
        assert registry.create(OWNER, PLAIN, acked=0)[1]
    with pytest.raises(LimitExceeded, match="the limit of 5 subscriptions is reached"):
        registry.create(OWNER, PLAIN, acked=0)


def test_caller_may_create_one_subscription_when_the_maximum_is_one(opened: Callable[..., Registry]) -> None:
    assert opened(most=1).create(ANN, PLAIN, acked=0)[1]


def test_bytes_of_one_callers_options_are_limited_until_a_subscription_is_removed(
    opened: Callable[..., Registry],
) -> None:
    most = 3 * len(msgspec.json.encode(RICH)) - 1
    registry = opened(most_bytes=most)
    one, _ = registry.create(ANN, RICH, acked=0, name="a")
    registry.create(ANN, RICH, acked=0)
    for restart in (False, True):
        registry = opened(most_bytes=most) if restart else registry
        with pytest.raises(LimitExceeded, match=f"'ann' would store more than {most} bytes") as caught:
            registry.create(ANN, RICH, acked=0)
        assert "feeds.max_subscription_bytes" in caught.value.hint
        assert not registry.create(ANN, RICH, acked=0, name="a")[1]
    assert registry.create(ANN, PLAIN, acked=0)[1]
    assert registry.create(BOB, RICH, acked=0)[1]
    for _ in range(4):
        assert registry.create(OWNER, RICH, acked=0)[1]
    registry.remove(one.id)
    assert registry.create(ANN, RICH, acked=0)[1]
    registry.close_db("main")
    for _ in range(2):
        assert registry.create(ANN, RICH, acked=0)[1]


def test_callers_that_share_a_commit_share_the_limit_of_bytes(opened: Callable[..., Registry]) -> None:
    registry = opened(most_bytes=2 * len(msgspec.json.encode(RICH)))
    made = together(registry, *[lambda: registry.create(ANN, RICH, acked=0)] * 4)
    assert [isinstance(each, LimitExceeded) for each in made] == [False, False, True, True]
    assert len(registry.visible_to(ANN)) == 2


def test_failed_commit_counts_no_bytes(opened: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch) -> None:
    registry = opened(most_bytes=len(msgspec.json.encode(RICH)))
    with monkeypatch.context() as patched:
        patched.setattr(store, "insert", fail)
        with pytest.raises(StorageFull):
            registry.create(ANN, RICH, acked=0)
    assert registry.create(ANN, RICH, acked=0)[1]


def fail(*_: Any) -> None:
    raise apsw.FullError("full")


# --- quiet stretches -------------------------------------------------------------------------------------


def test_offset_without_matches_moves_the_cursor_and_is_stored_later(
    opened: Callable[..., Registry], place: Path
) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=5)[0].id
    before = registry._commits.commits
    assert registry.quiet(id, 50, after=5)
    assert registry.quiet(id, 90, after=40)
    assert not registry.quiet(id, 90, after=90)
    assert (registry.get(ANN, id).cursor, registry.get(ANN, id).acked, registry._commits.commits) == (90, 5, before)
    registry.flush_quiet()
    registry.flush_quiet()
    assert registry._commits.commits == before + 1
    assert stored(place) == [(id, 5, 90)]
    registry.quiet(id, 91, after=90)
    assert opened().get(ANN, id).cursor == 91


def test_next_write_of_a_subscription_also_stores_its_quiet_offset(
    opened: Callable[..., Registry], place: Path
) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=5)[0].id
    registry.quiet(id, 50, after=5)
    registry.set_paused(id, True)
    assert stored(place) == [(id, 5, 50)]
    registry.quiet(id, 60, after=50)
    registry.ack(id, 7)
    assert stored(place) == [(id, 7, 60)]
    assert registry.get(ANN, id).cursor == 60


def test_offset_without_matches_beyond_the_cursor_moves_nothing(opened: Callable[..., Registry]) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=5)[0].id
    assert not registry.quiet(id, 50, after=6)  # 6 was delivered, and not acked
    registry.quiet(id, 50, after=5)
    registry.seek(id, 3)
    assert not registry.quiet(id, 60, after=50)  # scanned before the seek
    assert registry.get(ANN, id).cursor == 3


def test_seek_back_is_not_undone_by_a_quiet_offset_in_the_same_commit(
    opened: Callable[..., Registry], place: Path
) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=20)[0].id
    registry.quiet(id, 50, after=20)
    together(registry, lambda: registry.seek(id, 3), registry.flush_quiet, lambda: registry.ack(id, 21))
    assert registry.get(ANN, id).cursor == 21
    assert stored(place) == [(id, 21, 3)]


def stored(place: Path) -> list[tuple[Any, ...]]:
    """Return the content of the file, as another process reads it."""
    connection = apsw.Connection(str(place))
    try:
        return list(connection.execute("SELECT id, acked, quiet FROM subscription ORDER BY id"))
    finally:
        connection.close()


def together(registry: Registry, *calls: Callable[[], Any]) -> list[Any]:
    """Make these calls share one commit, in this order: they queue behind a blocked call."""
    commits: Any = registry._commits
    with ThreadPoolExecutor(len(calls)) as pool:
        commits._leading.acquire()
        futures = []
        for number, call in enumerate(calls):
            futures.append(pool.submit(call))
            while len(commits._waiting) <= number:
                time.sleep(0)
        before = registry._commits.commits
        commits._leading.release()
        errors = [future.exception(timeout=PATIENCE) for future in futures]
    assert registry._commits.commits == before + 1
    return [error or future.result() for error, future in zip(errors, futures, strict=True)]


# --- group commit ----------------------------------------------------------------------------------------


def test_two_creates_of_one_name_in_one_commit_give_one_subscription(opened: Callable[..., Registry]) -> None:
    registry = opened()
    (one, first), (other, second) = together(
        registry,
        lambda: registry.create(ANN, PLAIN, acked=1, name="n"),
        lambda: registry.create(ANN, PLAIN, acked=2, name="n"),
    )
    assert one is other
    assert (first, second) == (True, False)


def test_error_of_one_job_does_not_affect_the_others(opened: Callable[..., Registry]) -> None:
    registry = opened()
    id, gone = (registry.create(ANN, PLAIN, acked=0)[0].id for _ in range(2))
    done, missing, broken, last = together(
        registry,
        lambda: registry.remove(gone),
        lambda: registry.ack(gone, 4),
        lambda: registry.save_snapshot(id, FRESH.read(offset=2**64, end=b"", next_key=None)),  # does not fit
        lambda: registry.ack(id, 4),
    )
    assert done is None
    assert isinstance(missing, NotFound)
    assert isinstance(broken, OverflowError)
    assert last.acked == 4
    assert [(one["id"], one["acked"], one["snapshot"]) for one in everything(opened())] == [(id, 4, None)]


def test_later_of_two_acks_in_one_commit_wins(opened: Callable[..., Registry]) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=0)[0].id
    together(registry, lambda: registry.ack(id, 9), lambda: registry.ack(id, 7))
    assert registry.get(ANN, id).acked == 9
    assert opened().get(ANN, id).acked == 9


def test_concurrent_callers_lose_no_write(opened: Callable[..., Registry]) -> None:
    registry = opened()
    ids = [registry.create(ANN, PLAIN, acked=0)[0].id for _ in range(8)]
    start = threading.Barrier(len(ids))

    def work(id: str) -> None:
        start.wait(PATIENCE)
        for offset in range(1, 26):
            assert registry.ack(id, offset).acked == offset

    with ThreadPoolExecutor(len(ids)) as pool:
        list(pool.map(work, ids))
    assert [one["acked"] for one in everything(opened())] == [25] * 8


# --- snapshots -------------------------------------------------------------------------------------------


def test_snapshot_merges_adjacent_stretches_of_one_offset() -> None:
    state = FRESH.read(offset=5, end=b"c", next_key=(1,)).read(offset=5, end=b"f", next_key=(2,))
    assert state.chunks == (SnapshotSpan("t", b"f", 5),)
    assert state.after_key == (2,)
    state = state.read(offset=6, end=b"", next_key=None)
    assert state.chunks == (SnapshotSpan("t", b"f", 5), SnapshotSpan("t", END, 6))
    assert (state.table, state.after_key, state.done) == (1, None, False)
    state = state.read(offset=6, end=b"", next_key=None)
    assert state.chunks[-1] == SnapshotSpan("u", END, 6)
    assert state.done
    again = state.restarted(99)
    assert again == SnapshotState(tables=("t", "u"), run=2, lease_started_ms=99)


def test_keys_of_invalid_text_survive_a_round_trip() -> None:
    key = ("caf\udce9", b"caf\xe9", 1, 1.0)
    after = FRESH.read(offset=5, end=b"c", next_key=key).after_key
    assert after == key
    assert after is not None
    assert [type(value) for value in after] == [type(value) for value in key]


def test_snapshot_continues_after_a_restart(opened: Callable[..., Registry]) -> None:
    chance = random.Random(5)
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=0, snapshot=FRESH)[0].id
    state = FRESH
    for number in range(60):
        if state.done or chance.random() < 0.05:
            state = state.restarted(number)
        last = chance.random() < 0.1
        offset = number // chance.choice((1, 3))
        state = state.read(offset=offset, end=b"%04d" % number, next_key=None if last else (number,))
        registry.save_snapshot(id, state)
        if chance.random() < 0.3:
            registry = opened()
            assert registry.get(ANN, id).snapshot == state
    registry.save_snapshot(id, state.restarted(1), acked=3)
    assert opened().get(ANN, id).snapshot == state.restarted(1)
    assert opened().get(ANN, id).cursor == 3
    opened().save_snapshot(id, None)
    assert opened().get(ANN, id).snapshot is None


def test_complete_or_restarted_snapshot_leaves_no_chunks(opened: Callable[..., Registry], place: Path) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=0)[0].id
    long = FRESH.read(offset=1, end=b"a", next_key=(1,)).read(offset=2, end=b"b", next_key=(2,))
    short = FRESH.read(offset=3, end=b"c", next_key=(3,))
    registry.save_snapshot(id, long)
    registry.save_snapshot(id, short)
    assert opened().get(ANN, id).snapshot == short
    registry = opened()
    registry.save_snapshot(id, long.restarted(1))
    assert chunks(place) == 0
    registry.save_snapshot(id, long)
    registry.save_snapshot(id, None)
    assert chunks(place) == 0
    registry.save_snapshot(id, long)
    registry.remove(id)
    assert chunks(place) == 0


def chunks(place: Path) -> int:
    connection = apsw.Connection(str(place))
    try:
        return int(connection.execute("SELECT count(*) FROM chunk").get)
    finally:
        connection.close()


def test_page_of_a_long_snapshot_costs_as_much_as_of_a_short_one(opened: Callable[..., Registry], place: Path) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=0, snapshot=FRESH)[0].id
    state = FRESH
    for number in range(3000):
        state = state.read(offset=number, end=b"%08d" % number * 10, next_key=(number,))
    registry.save_snapshot(id, state)
    before = wal_size(place)
    for number in range(3000, 3020):
        state = state.read(offset=number, end=b"%08d" % number * 10, next_key=(number,))
        registry.save_snapshot(id, state)
    assert (wal_size(place) - before) / 20 < 6 * 4200  # pages per commit


def wal_size(place: Path) -> int:
    return place.with_name(place.name + "-wal").stat().st_size


# --- disk errors -----------------------------------------------------------------------------------------


@pytest.fixture
def disk() -> Iterator[FaultyVFS]:
    made = FaultyVFS()
    yield made
    made.full = made.fail_sync = made.fail_read = False
    made.unregister()


@pytest.mark.parametrize(("fault", "error"), [("full", StorageFull), ("fail_sync", Unavailable)])
def test_failed_write_changes_nothing(disk: FaultyVFS, place: Path, fault: str, error: type[HeadwaterError]) -> None:
    registry = Registry.open(place, vfs=disk.name)
    one = registry.create(ANN, PLAIN, acked=5, name="n", snapshot=FRESH)[0]
    registry.quiet(one.id, 6, after=5)
    before = everything(registry)
    setattr(disk, fault, True)
    calls: list[Callable[[], Any]] = [
        lambda: registry.create(ANN, PLAIN, acked=0),
        lambda: registry.ack(one.id, 9),
        lambda: registry.seek(one.id, 1),
        lambda: registry.set_paused(one.id, True),
        lambda: registry.save_snapshot(one.id, FRESH.read(offset=1, end=b"a", next_key=(1,))),
        lambda: registry.remove(one.id),
        lambda: registry.close_db("main"),
        registry.flush_quiet,
    ]
    for call in calls:
        with pytest.raises(HeadwaterError) as found:
            call()
        assert type(found.value) is error
        assert f"({place.name})" in found.value.message and str(place.parent) not in found.value.message
        assert found.value.hint
    assert everything(registry) == before
    setattr(disk, fault, False)
    assert registry.ack(one.id, 9).acked == 9
    assert registry.create(ANN, PLAIN, acked=0)[0].id == f"sub_{1:016x}"
    after = everything(registry)
    registry.close()
    registry = Registry.open(place)
    assert everything(registry) == after
    registry.close()


# --- foreign and damaged files ---------------------------------------------------------------------------


def test_file_that_is_no_database_is_rejected_and_unchanged(place: Path) -> None:
    place.write_bytes(b"not a database at all" * 100)
    with pytest.raises(LogDamaged) as found:
        Registry.open(place)
    assert f"({place.name})" in found.value.message and str(place.parent) not in found.value.message
    assert "subscribe again" in found.value.hint
    assert place.read_bytes() == b"not a database at all" * 100


def change(place: Path, *statements: str) -> None:
    connection = apsw.Connection(str(place))
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_foreign_database_is_rejected_and_unchanged(place: Path) -> None:
    change(place, "CREATE TABLE theirs (a)")
    before = place.read_bytes()
    with pytest.raises(LogDamaged, match="does not hold subscriptions"):
        Registry.open(place)
    assert place.read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("PRAGMA user_version = 9", "format 9"),
        ("DROP TABLE chunk", "chunk"),
        ("UPDATE subscription SET options = '{'", "sub_0000000000000000"),
        ("UPDATE subscription SET snapshot = '[]'", "sub_0000000000000000"),
    ],
)
def test_unreadable_file_is_rejected_with_the_reason(
    opened: Callable[..., Registry], place: Path, damage: str, message: str
) -> None:
    opened().create(ANN, PLAIN, acked=0, snapshot=FRESH)
    opened().close()
    change(place, damage)
    with pytest.raises(LogDamaged, match=message) as found:
        Registry.open(place)
    assert found.value.hint


def test_missing_folder_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be opened"):
        Registry.open(tmp_path / "nowhere" / "subscriptions.db")


def test_closed_registry_refuses_an_ack_and_writes_nothing(opened: Callable[..., Registry]) -> None:
    registry = opened()
    id = registry.create(ANN, PLAIN, acked=0)[0].id
    registry.close()
    registry.close()
    with pytest.raises(Unavailable, match="closed"):
        registry.ack(id, 5)
    assert registry.get(ANN, id).acked == 0


# --- kill -9 ---------------------------------------------------------------------------------------------


def random_step(registry: Registry, chance: random.Random) -> Callable[[Registry], Any]:
    """Return one random call, chosen by the state and by `chance` alone, so that another process chooses the same."""
    ids = [one.id for one in registry.visible_to(OWNER)]
    if not ids or chance.random() < 0.15:
        name = chance.choice((None, f"n{chance.randrange(1000)}"))
        started = FRESH if chance.random() < 0.5 else None
        return lambda each: each.create(ANN, PLAIN, acked=chance.randrange(50), name=name, snapshot=started)
    id, offset = chance.choice(ids), chance.randrange(1000)
    state = registry.get(OWNER, id).snapshot or FRESH
    state = state.restarted(offset) if state.done or chance.random() < 0.1 else state
    grown = state.read(offset=offset // 100, end=b"%d" % offset, next_key=chance.choice(((offset,), (offset,), None)))
    calls: list[Callable[[Registry], Any]] = [
        lambda each: each.ack(id, offset),
        lambda each: each.seek(id, offset),
        lambda each: each.set_paused(id, True),
        lambda each: each.set_paused(id, False),
        lambda each: each.save_snapshot(id, chance.choice((grown, grown, grown, None))),
        lambda each: each.remove(id) if len(ids) > 4 else None,
    ]
    return chance.choice(calls)


def walk(place: Path, seed: int, vfs: str | None = None) -> Generator[Registry, None, None]:
    """Yield the registry before the first random step and after each step."""
    registry, chance = Registry.open(place, clock_ms=lambda: 0, vfs=vfs), random.Random(seed)
    try:
        while True:
            yield registry
            random_step(registry, chance)(registry)
    finally:
        registry.close()


def states(place: Path, seed: int, steps: int) -> list[list[Any]]:
    """Return the content of the registry before the first step and after each step."""
    with closing(walk(place, seed)) as walking:
        return [everything(registry) for registry in islice(walking, steps + 1)]


class Fuse(apsw.VFS):
    """A file system that ends the process before a certain write or fsync."""

    def __init__(self, left: int) -> None:
        self.left = left
        super().__init__("fuse", "")

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return FuseFile(self, name, flags)

    def burn(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


class FuseFile(apsw.VFSFile):
    def __init__(self, fuse: Fuse, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._fuse = fuse

    def xWrite(self, data: bytes, offset: int) -> None:
        self._fuse.burn()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._fuse.burn()
        super().xSync(flags)


@pytest.mark.slow
def test_acknowledged_writes_survive_kill_9_and_others_are_atomic(tmp_path: Path) -> None:
    chance = random.Random(11)
    real, twin = tmp_path / "real.db", tmp_path / "twin.db"
    for seed, fuse in enumerate([chance.randrange(40), *(chance.randrange(600) for _ in range(3))]):
        child = subprocess.run(
            [sys.executable, "-m", "tests.feeds.subscriptions.test_registry", str(real), str(seed), str(fuse)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            check=False,
        )
        assert child.returncode == -signal.SIGKILL
        returned = child.stdout.count(b"\n")
        registry = Registry.open(real)
        found = everything(registry)
        registry.close()
        assert found in states(twin, seed, returned + 1)[returned:], f"seed {seed}: {returned} calls returned"
        shutil.copy(real, twin)


if __name__ == "__main__":
    fuse = Fuse(int(sys.argv[3]))  # must stay referenced
    for number, _ in enumerate(walk(Path(sys.argv[1]), int(sys.argv[2]), "fuse")):
        if number:
            os.write(1, b"told\n")


# --- names and lists -------------------------------------------------------------------------------------


class Only:
    """A set of databases that has one open database."""

    def __init__(self, fed: Fed) -> None:
        self._fed = fed

    def database(self, name: str) -> Fed:
        return self._fed

    def names(self) -> list[str]:
        return ["main"]


@pytest.fixture
def fed() -> Fed:
    found = Fed()
    for id in range(5):
        found.commit(insert(id))
    found.log.flush()
    return found


def ask(subscriptions: Subscriptions, **params: Any) -> dict[str, Any]:
    return subscriptions.subscribe(ANN, SubscribeTable(table="items", **params))


def test_create_by_name_finds_the_subscription_if_its_start_was_evicted(
    opened: Callable[..., Registry], fed: Fed
) -> None:
    for reopen in (False, True):
        registry = opened()
        subscriptions = Subscriptions(Only(fed), registry)
        for name, start in (("an offset", {"offset": 1}), ("a time", {"ts": 1}), ("beyond", {"offset": 3})):
            found = ask(subscriptions, name=name, start=start)
            assert found["created"] is not reopen
        fed.trim(1)
    beyond = ask(subscriptions, name="beyond", start={"offset": 10**9})
    assert (beyond["created"], beyond["offset"]) == (False, 3)
    with pytest.raises(HeadwaterError):
        ask(subscriptions, start={"offset": 1})


def test_request_without_images_matches_an_existing_name_with_any_images(
    opened: Callable[..., Registry], fed: Fed
) -> None:
    subscriptions = Subscriptions(Only(fed), opened())
    first = ask(subscriptions, name="rows", start="snapshot")
    again = ask(subscriptions, name="rows")
    assert {**again, "created": True} == first
    assert not ask(subscriptions, name="rows", include={"after": True})["created"]
    for include in ({}, {"before": True, "after": True}):
        with pytest.raises(Conflict):
            ask(subscriptions, name="rows", include=include)
    with pytest.raises(Conflict):
        ask(subscriptions, name="rows", ops=["insert"])
    with pytest.raises(Conflict):
        subscriptions.subscribe(BOB, SubscribeTable(table="items", name="rows"))


def test_name_is_forgotten_with_its_subscription(opened: Callable[..., Registry]) -> None:
    registry = opened()
    made, _ = registry.create(ANN, PLAIN, acked=0, name="x")
    assert registry.named(ANN, PLAIN, "x") is made
    assert registry.named(ANN, PLAIN, "y") is None
    assert registry.named(ANN, Options(db="other"), "x") is None
    registry.remove(made.id)
    assert registry.named(ANN, PLAIN, "x") is None
    made, _ = registry.create(ANN, PLAIN, acked=0, name="x")
    registry.close_db("main")
    assert registry.named(ANN, PLAIN, "x") is None


def test_create_without_named_images_matches_an_existing_name_with_other_images(
    opened: Callable[..., Registry],
) -> None:
    registry = opened()
    made, _ = registry.create(ANN, PLAIN, acked=0, name="x")
    seen = msgspec.structs.replace(PLAIN, after=True)
    assert registry.create(ANN, seen, acked=0, name="x", names_images=False) == (made, False)
    with pytest.raises(Conflict):
        registry.create(ANN, seen, acked=0, name="x")


def test_listed_subscriptions_are_paged_and_a_removed_page_mark_still_works(
    opened: Callable[..., Registry], fed: Fed
) -> None:
    registry = opened()
    subscriptions = Subscriptions(Only(fed), registry)
    made = [ask(subscriptions)["sub_id"] for _ in range(5)]
    subscriptions.subscribe(BOB, SubscribeTable(table="items"))
    seen: list[str] = []
    sizes: list[int] = []
    after: str | None = None
    while not sizes or after is not None:
        page = subscriptions.list(ANN, None, limit=2, after=after)
        sizes.append(len(page["subscriptions"]))
        seen += [one["sub_id"] for one in page["subscriptions"]]
        after = page.get("next")
    assert (seen, sizes) == (made, [2, 2, 1])
    assert "next" not in subscriptions.list(ANN, "main", limit=5)
    assert "next" not in subscriptions.list(ANN, "main")
    registry.remove(made[1])
    page = subscriptions.list(ANN, "main", limit=10_000, after=made[1])
    assert [one["sub_id"] for one in page["subscriptions"]] == made[2:], "a place stays when its subscription goes"


@pytest.mark.parametrize("bad", [{"limit": 0}, {"limit": 10_001}, {"after": "x"}, {"after": "sub_1"}])
def test_page_out_of_range_is_rejected(opened: Callable[..., Registry], fed: Fed, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Subscriptions(Only(fed), opened()).list(ANN, None, **bad)
    assert refused.value.hint


def test_seek_without_or_with_two_targets_is_rejected_with_a_hint(opened: Callable[..., Registry], fed: Fed) -> None:
    subscriptions = Subscriptions(Only(fed), opened())
    id = ask(subscriptions)["sub_id"]
    for offset, ts in ((None, None), (1, 1)):
        with pytest.raises(InvalidRequest) as refused:
            subscriptions.seek(ANN, id, offset, ts)
        assert refused.value.hint
    with pytest.raises(InvalidRequest, match=r"^ts .* is in the future"):
        subscriptions.seek(ANN, id, None, 99_999_999_999_999)


def test_unknown_id_that_is_a_visible_name_gets_a_hint(
    opened: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = opened()
    theirs = registry.create(BOB, Options(db="other"), acked=0, name="shared")[0]
    mine = registry.create(ANN, PLAIN, acked=0, name="shared")[0]
    for _ in range(2):  # the second time as loaded from the file
        monkeypatch.setattr(registry, "_everything", lambda: pytest.fail("every subscription was looked at"))
        with pytest.raises(NotFound) as found:
            registry.get(ANN, "shared")
        assert mine.id in found.value.hint
        with pytest.raises(NotFound) as found:
            registry.get(ANN, "nothing")
        assert mine.id not in found.value.hint
        registry = opened()
    registry.remove(mine.id)
    with pytest.raises(NotFound) as found:
        registry.get(ANN, "shared")
    assert mine.id not in found.value.hint and theirs.id not in found.value.hint
