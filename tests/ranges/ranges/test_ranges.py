"""Ranges of real tables: split once, kept over restarts, split again after a table changed; and leases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.capture.captured_database import Running, running
from tests.suite.deadlines import PATIENCE

from headwater.app import App
from headwater.config import Config, FeedsConfig, LogConfig, PullConfig
from headwater.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    NotOwner,
    NotSupported,
    OffsetExpired,
    StaleEpoch,
    StorageFull,
)
from headwater.log.log import Retention
from headwater.model.clock import wall_ms
from headwater.model.keys.key import Span, encode_key
from headwater.model.keys.range import Range
from headwater.model.principal import ANONYMOUS, Principal, Scope
from headwater.ranges.pull.table_status import Described
from headwater.ranges.ranges import lease as leases
from headwater.ranges.ranges.lease import restore_leases
from headwater.ranges.ranges.ranges import Ranges
from headwater.ranges.ranges.store import Store

pytestmark = pytest.mark.slow

NUMBERS = "WITH RECURSIVE n(i) AS (SELECT {} UNION ALL SELECT i + 1 FROM n WHERE i < {})"
MANY = NUMBERS.format(1, 3000) + " INSERT INTO t SELECT i, zeroblob(100) FROM n"
ANN, BOB, ROOT = Principal("ann", "viewer"), Principal("bob", "editor"), Principal("root", "owner")
TARGET = 50_000  # bytes; the 3,000 rows weigh about 330,000


class One:
    """One captured database and its ranges."""

    def __init__(self, folder: Path, made: Running, **settings: Any) -> None:
        self.made, self.now = made, wall_ms()
        self.source, self.log = made.source, made.log
        self.store = Store.open(folder / "ranges.db")
        self.ranges = self.open(**settings)

    def open(self, lease_seconds: float = 60.0, target: int = TARGET) -> Ranges:
        leases = FeedsConfig(lease_seconds=lease_seconds)
        return Ranges(self, self.store, PullConfig(target_bytes=target), leases, now_ms=lambda: self.now)

    def database(self, name: str) -> One:
        if name != "main":
            raise NotFound(f"there is no database {name!r}")
        return self

    def names(self) -> list[str]:
        return ["main"]

    def catch_up(self, timeout: float) -> bool:
        return self.made.capture.catch_up(timeout)

    def listed(self, table: str = "t", target: int | None = None, who: Principal = ANONYMOUS) -> list[Range]:
        found = self.ranges.listed(who, None, table, target)
        assert found.generation == self.log.generation
        edges = [(one.span.start, one.span.end) for one in found.ranges]
        assert edges[0][0] == b"" and edges[-1][1] is None
        assert all(one[1] == other[0] for one, other in zip(edges, edges[1:], strict=False))
        return found.ranges

    def find(self, one: Range) -> Span:
        return self.ranges.find(ANONYMOUS, None, "t", one.id, one.epoch)

    def stale(self, one: Range) -> list[Any]:
        with pytest.raises(StaleEpoch) as caught:
            self.find(one)
        return list(caught.value.details["ranges"])

    def describe(self, table: str = "t", **asked: Any) -> Described:
        return asyncio.run(self.ranges.describe(ANONYMOUS, None, table, **asked))


@pytest.fixture
def one(tmp_path: Path) -> Iterator[One]:
    with running(tmp_path) as made:
        made.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        opened = One(tmp_path, made)
        yield opened
        opened.store.close()


def wire(ranges: list[Range]) -> list[Any]:
    return [one.wire() for one in ranges]


# --- cutting -----------------------------------------------------------------------------------------------------


def test_empty_table_has_one_range_over_all_keys(one: One) -> None:
    (only,) = one.listed()
    assert (only.span, only.rows, only.bytes, only.epoch) == (Span.all(), 0, 0, 1)


def test_table_is_split_into_ranges_of_similar_bytes_that_are_kept_after_reopening(one: One) -> None:
    one.made.run(MANY)
    found = one.listed()
    assert len(found) == 7 and all(0.8 < each.bytes / (330_000 / 7) < 1.2 for each in found)
    assert one.listed() == found
    assert [one.find(each) for each in found] == [each.span for each in found]
    again = one.open()
    assert again.listed(ANONYMOUS, "default", "t").ranges == found


def test_ranges_that_grow_are_split_and_those_that_shrink_are_merged(one: One) -> None:
    (first,) = one.listed()
    one.made.run(MANY)
    grown = one.listed()
    assert len(grown) == 7 and grown[0].id == first.id and {each.epoch for each in grown} == {2}
    assert one.stale(first) == wire(grown)
    one.made.run("DELETE FROM t WHERE k > 400")
    shrunk = one.listed()
    assert len(shrunk) == 1 + (shrunk[0].bytes > TARGET / 2)
    assert one.stale(grown[-1]) == wire(shrunk[-1:])


def test_range_size_requested_last_is_used_by_later_calls(one: One) -> None:
    one.made.run(MANY)
    large = one.listed(target=400_000)
    assert len(large) == 1 and one.listed() == large
    small = one.listed(target=50_000)
    assert len(small) == 7 and one.listed() == small


def test_target_size_of_a_viewer_keeps_existing_ranges(one: One) -> None:
    one.made.run(MANY)
    found = one.listed()
    for who in (ANN, BOB):
        for target in (1, 10**6, 10**12):
            assert one.listed(target=target, who=who) == found
    assert [one.find(each) for each in found] == [each.span for each in found]
    assert len(one.listed(target=10**6, who=ROOT)) == 1
    assert len(one.listed(who=ANN)) == 1


def test_target_size_of_a_viewer_splits_a_table_without_ranges_within_bounds(one: One) -> None:
    one.made.run(MANY)
    one.made.run("CREATE TABLE u AS SELECT * FROM t")
    assert len(one.listed(target=200_000, who=ANN)) == 2
    assert len(one.listed("u", target=1, who=ANN)) == 7, "not below what is configured"
    assert one.open(target=5 << 20).listed(ANN, None, "t", 1).ranges == one.listed()


@pytest.mark.parametrize(
    ("configured", "asked", "kept"),
    [(64 << 20, 1, 1 << 20), (64 << 20, 3 << 20, 3 << 20), (64 << 20, 2**62, 1 << 30), (2 << 30, 2**62, 2 << 30)],
)
def test_target_size_of_a_viewer_is_limited_to_bounds(one: One, configured: int, asked: int, kept: int) -> None:
    one.open(target=configured).listed(ANN, None, "t", asked)
    cut = one.store.cut("main", "t")
    assert cut is not None and cut.target == kept


def test_table_split_again_for_a_viewer_keeps_its_target(one: One) -> None:
    one.made.run(MANY)
    one.listed(target=400_000)
    one.made.run("ALTER TABLE t ADD COLUMN w")
    one.made.caught_up()
    one.listed(target=50_000, who=ANN)
    cut = one.store.cut("main", "t")
    assert cut is not None and (cut.target, cut.version) == (400_000, one.source.describe()["t"].version)


def test_ranges_that_grow_are_split_for_a_viewer(one: One) -> None:
    assert len(one.listed(who=ANN)) == 1
    one.made.run(MANY)
    assert len(one.listed(target=10**6, who=ANN)) == 7


def test_ranges_are_not_sampled_again_after_few_changes(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    one.made.run(MANY)
    found = one.listed()
    one.made.run("UPDATE t SET v = 1 WHERE k < 10")
    monkeypatch.setattr(type(one.source), "sample", lambda *_: pytest.fail("a sample for nothing"))
    assert one.listed() == found


def test_range_is_split_in_the_middle_or_at_a_given_key_and_a_bad_key_is_rejected(one: One) -> None:
    one.made.run(MANY)
    (whole,) = one.listed(target=10**6)
    left, right = one.ranges.split(ANONYMOUS, None, "t", whole.id, 1).ranges
    assert 0.9 < left.rows / right.rows < 1.1 and (left.id, left.epoch, right.epoch) == (whole.id, 2, 2)
    at = encode_key((2900,))
    middle, last = one.ranges.split(ANONYMOUS, None, "t", right.id, 2, at).ranges
    assert (middle.span.end, last.span.start, last.rows) == (at, at, pytest.approx(101, abs=5))
    assert one.stale(whole) == wire([left, middle, last])
    for bad in (b"", at, b"\xff\xff", right.span.start, encode_key((1, 2)), encode_key((5000,))[:-1]):
        with pytest.raises(InvalidRequest):
            one.ranges.split(ANONYMOUS, None, "t", middle.id, middle.epoch, bad)


def test_split_of_a_range_with_too_few_keys_is_refused(one: One) -> None:
    one.made.run("INSERT INTO t VALUES (1, 1)")
    (only,) = one.listed()
    with pytest.raises(InvalidRequest, match="too few"):
        one.ranges.split(ANONYMOUS, None, "t", only.id, only.epoch)


def test_only_neighbouring_ranges_can_be_merged(one: One) -> None:
    one.made.run(MANY)
    found = one.listed()
    for pair in ((0, 2), (1, 1), (0, 6)):
        with pytest.raises(InvalidRequest, match="neighbours"):
            one.ranges.merge(ANONYMOUS, None, "t", [(found[n].id, found[n].epoch) for n in pair])
    (both,) = one.ranges.merge(ANONYMOUS, None, "t", [(found[n].id, found[n].epoch) for n in (4, 3)]).ranges
    assert (both.id, both.epoch, both.span) == (found[3].id, 2, Span(found[3].span.start, found[4].span.end))
    assert one.stale(found[3]) == one.stale(found[4]) == wire([both])
    with pytest.raises(StaleEpoch):
        one.ranges.merge(ANONYMOUS, None, "t", [(found[3].id, 1), (found[2].id, 1)])


def test_unknown_range_is_not_found(one: One) -> None:
    one.made.run("CREATE TABLE u(k INTEGER PRIMARY KEY)")
    (other,) = one.listed("u")
    one.listed()
    for id in (0, 99, other.id):
        with pytest.raises(NotFound):
            one.ranges.find(ANONYMOUS, None, "t", id, 1)


def test_unknown_range_error_names_the_listing_of_rpc_and_of_grpc(one: One) -> None:
    one.listed()
    for call in (
        lambda: one.ranges.find(ANONYMOUS, None, "t", 99, 1),
        lambda: one.ranges.enter(ANONYMOUS, 99, 1),
    ):
        with pytest.raises(NotFound) as caught:
            call()
        assert "pull.ranges" in caught.value.hint and "ListRanges" in caught.value.hint


@pytest.mark.parametrize(
    "ddl", [("DROP TABLE t", "CREATE TABLE t(k TEXT PRIMARY KEY, v)"), ("ALTER TABLE t ADD COLUMN w",)]
)
def test_changed_table_is_split_again_with_new_ids(one: One, ddl: tuple[str, ...]) -> None:
    one.made.run(MANY)
    old = one.listed()
    for sql in ddl:
        one.made.run(sql)
    new = wire(one.listed())
    assert [one.stale(each) for each in old] == [new] * len(old)
    assert not {each["id"] for each in new} & {each.id for each in old}


def test_new_generation_of_the_log_splits_tables_again(tmp_path: Path) -> None:
    with running(tmp_path) as made:
        made.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        made.run(MANY)
        one = One(tmp_path, made)
        old = one.listed()
        one.store.close()
    (tmp_path / "app.log.db").unlink()
    with running(tmp_path) as made:
        one = One(tmp_path, made)
        assert [one.stale(each) for each in old] == [wire(one.listed())] * len(old)
        one.store.close()


def test_tables_that_are_not_there_or_not_captured_are_refused(tmp_path: Path) -> None:
    with running(tmp_path, tables=("t",)) as made:
        made.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        made.run("CREATE TABLE aside(k INTEGER PRIMARY KEY, v)")
        one = One(tmp_path, made)
        for call in (
            lambda name: one.listed(name),
            lambda name: one.describe(name),
            lambda name: one.ranges.register(ANONYMOUS, None, name, "s"),
            lambda name: one.ranges.find(ANONYMOUS, None, name, 1, 1),
        ):
            with pytest.raises(NotSupported, match="not captured"):
                call("aside")
            with pytest.raises(NotFound, match="there is no table") as caught:
                call("asid")
            assert "aside" in caught.value.hint
        one.store.close()


# --- leases ------------------------------------------------------------------------------------------------------


def test_registered_snapshot_offset_is_durable_and_includes_every_earlier_commit(one: One) -> None:
    for n in range(20):
        offset = one.made.run(f"INSERT INTO t VALUES ({n}, 1)")
        found = one.ranges.register(ANONYMOUS, None, "t", "lake")
        assert one.log.durable >= found.version >= offset
        assert (found.generation, found.lease_seconds) == (one.log.generation, 60.0)


def trimmed(one: One) -> int:
    """Apply retention until only leases hold changes; return the horizon."""
    one.made.caught_up()
    while one.log.retain(Retention(changes=1), now_ms=one.now):
        pass
    return one.log.horizon


def test_registered_pull_prevents_log_trimming_until_released(one: One) -> None:
    found = one.ranges.register(ANONYMOUS, None, "t", "lake")
    one.made.run(MANY)
    assert trimmed(one) <= found.version + 1
    assert one.ranges.release(ANONYMOUS, None, "t", "other") is False
    assert trimmed(one) <= found.version + 1
    assert one.ranges.release(ANONYMOUS, None, "t", "lake") is True
    assert trimmed(one) == one.log.latest
    assert one.ranges.release(ANONYMOUS, None, "t", "lake") is False


def test_later_registration_moves_the_lease_unless_it_has_keep(one: One) -> None:
    first = one.ranges.register(ANONYMOUS, None, "t", "lake")
    one.made.run(MANY)
    second = one.ranges.register(ANONYMOUS, None, "t", "lake", keep=first.version)
    assert second.version == first.version + 3000 and trimmed(one) <= first.version + 1
    third = one.ranges.register(ANONYMOUS, None, "t", "lake")
    assert trimmed(one) == third.version
    with pytest.raises(OffsetExpired):
        one.ranges.register(ANONYMOUS, None, "t", "lake", keep=first.version)
    with pytest.raises(InvalidRequest, match="beyond"):
        one.ranges.register(ANONYMOUS, None, "t", "lake", keep=third.version + 1)
    assert one.store.leases("main")[0].kept == third.version


def test_each_range_and_table_of_a_subscriber_has_its_own_lease(one: One) -> None:
    one.made.run("CREATE TABLE u(k INTEGER PRIMARY KEY)")
    (range,) = one.listed()
    low = one.ranges.register(ANONYMOUS, None, "t", "lake", range=range.id, epoch=range.epoch)
    one.made.run(MANY)
    one.ranges.register(ANONYMOUS, None, "u", "lake")
    one.ranges.register(ANONYMOUS, None, "t", "lake")
    assert trimmed(one) <= low.version + 1
    one.ranges.release(ANONYMOUS, None, "t", "lake")
    assert trimmed(one) > low.version + 1
    with pytest.raises(StaleEpoch):
        one.ranges.register(ANONYMOUS, None, "t", "lake", range=range.id, epoch=7)
    for half in ({"range": range.id}, {"epoch": 1}):
        with pytest.raises(InvalidRequest, match="belong together"):
            one.ranges.register(ANONYMOUS, None, "t", "lake", **half)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "a\0b", "\u202e"])
def test_register_or_release_with_an_invalid_subscriber_name_is_rejected(one: One, name: str) -> None:
    with pytest.raises(InvalidRequest, match="subscriber"):
        one.ranges.register(ANONYMOUS, None, "t", name)
    with pytest.raises(InvalidRequest, match="subscriber"):
        one.ranges.release(ANONYMOUS, None, "t", name)


def test_number_of_leases_is_limited(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MOST_LEASES", 2)
    for name in ("a", "b", "a"):
        one.ranges.register(ANONYMOUS, None, "t", name)
    with pytest.raises(LimitExceeded):
        one.ranges.register(ANONYMOUS, None, "t", "c")


def test_lease_of_another_principal_is_not_released(one: One) -> None:
    found = one.ranges.register(ROOT, None, "t", "lake")
    one.made.run(MANY)
    for other in (ANN, BOB):
        assert one.ranges.release(other, None, "t", "lake") is False
    assert trimmed(one) <= found.version + 1
    assert one.ranges.release(ROOT, None, "t", "lake") is True
    assert trimmed(one) == one.log.latest


def test_name_that_another_principal_registered_is_a_conflict(one: One) -> None:
    (range,) = one.listed()
    found = one.ranges.register(ANN, None, "t", "lake")
    one.made.run(MANY)
    for more in ({}, {"range": range.id, "epoch": range.epoch}):
        with pytest.raises(Conflict, match="'lake' is registered on 't'") as caught:
            one.ranges.register(BOB, None, "t", "lake", **more)
        assert "another name" in caught.value.hint
    assert trimmed(one) <= found.version + 1
    assert one.ranges.register(ANN, None, "t", "lake", keep=found.version).version > found.version
    one.now += 60_000
    one.ranges.register(BOB, None, "t", "lake")
    assert [each.owner for each in one.store.leases("main")] == ["bob"], "the lease of ann has ended"


def test_owner_replaces_and_releases_the_lease_of_a_viewer(one: One) -> None:
    one.ranges.register(ANN, None, "t", "lake")
    one.ranges.register(BOB, None, "t", "sea")
    found = one.ranges.register(ROOT, None, "t", "lake")
    one.made.run(MANY)
    assert one.ranges.release(ANN, None, "t", "lake") is False, "it is the owner's now"
    assert one.ranges.release(ROOT, None, "t", "sea") is True
    assert trimmed(one) <= found.version + 1
    held = Principal("shop", "owner", scopes=(Scope("main", ("u",)),))
    with pytest.raises(Forbidden):
        one.ranges.release(held, None, "t", "lake")
    assert [each.owner for each in one.store.leases("main")] == ["root"]


def test_lease_without_an_owner_is_replaced_and_released_by_anybody(one: One) -> None:
    for name in ("lake", "sea"):
        one.ranges.register(ROOT, None, "t", name)
    for pull in one.store.leases("main"):  # as an earlier Headwater stored them
        one.store.put_lease(msgspec.structs.replace(pull, owner=""), now_ms=one.now)
    assert one.ranges.release(ANN, None, "t", "sea") is True
    one.ranges.register(BOB, None, "t", "lake")
    assert [each.owner for each in one.store.leases("main")] == ["bob"]
    assert one.ranges.release(ANN, None, "t", "lake") is False


def test_lease_is_renewed_only_by_its_principal_or_an_owner(one: One) -> None:
    (range,) = one.listed()
    one.ranges.register(ANN, None, "t", "lake")
    entered = one.ranges.enter(ANN, range.id, range.epoch)
    one.now += 40_000
    (before,) = one.store.leases("main")
    with pytest.raises(NotOwner):
        one.ranges.keep_up(BOB, entered, "lake")
    assert one.store.leases("main") == [before]
    for who in (ANN, ROOT):
        one.ranges.keep_up(who, entered, "lake")
        (after,) = one.store.leases("main")
        assert (after.owner, after.until_ms) == ("ann", one.now + 60_000)
        one.now += 40_000


def test_leases_of_a_caller_without_the_owner_role_are_limited(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MOST_LEASES_PER_PRINCIPAL", 2)
    for name in ("a", "b", "a"):
        one.ranges.register(ANN, None, "t", name)
    before = one.store.leases("main")
    with pytest.raises(LimitExceeded, match="'ann' has registered 2 .* the share of one caller") as caught:
        one.ranges.register(ANN, None, "t", "c")
    assert "pull.release" in caught.value.hint and one.store.leases("main") == before
    one.ranges.register(BOB, None, "t", "c")
    for name in "def":
        one.ranges.register(ROOT, None, "t", name)
    one.ranges.release(ANN, None, "t", "a")
    one.ranges.register(ANN, None, "t", "g")


@pytest.mark.parametrize(
    "retention",
    [
        150,
        10,  # only the lease kept what it needs
    ],
)
def test_unexpired_lease_still_holds_the_horizon_after_a_restart(tmp_path: Path, retention: int) -> None:
    config = Config(str(tmp_path), log=LogConfig(retention_events=retention), feeds=FeedsConfig(lease_seconds=600.0))
    for restart in (False, True):
        app = App(config)
        app.start()
        try:
            database = app.database("main")
            if not restart:
                database.source.write(lambda s: s.execute("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")).result(PATIENCE)
                assert app.ranges is not None
                held = app.ranges.register(ANONYMOUS, None, "t", "lake")
            database.source.write(lambda s: s.execute("INSERT INTO t(v) VALUES (1)" + ", (1)" * 99)).result(PATIENCE)
            assert database.catch_up(PATIENCE) and database.log.latest > held.version + 99
            assert database.log.horizon <= held.version + 1
        finally:
            app.close()


def test_expired_lease_or_lease_of_another_generation_is_not_restored(one: One) -> None:
    one.ranges.register(ANONYMOUS, None, "t", "lake")
    (pull,) = one.store.leases("main")
    one.log.release(pull.name)
    one.store.put_lease(type(pull)("main", "late", "t", 0, pull.generation, pull.kept, until_ms=1), now_ms=0)
    one.store.put_lease(type(pull)("main", "old", "t", 0, "gone", pull.kept, pull.until_ms), now_ms=0)
    restore_leases(one.store, "main", one.log, max_bytes=1 << 30)
    held = {each.subscriber: one.log.held(each.name) for each in one.store.leases("main")}
    assert held == {"lake": True, "late": False, "old": False}


# --- describing --------------------------------------------------------------------------------------------------


def test_describe_reports_the_table_its_generation_horizon_and_durable_latest_offset(one: One) -> None:
    offset = one.made.run("INSERT INTO t VALUES (1, 1)")
    seen = one.describe()
    assert (seen.db, seen.table, seen.generation) == ("main", one.source.describe()["t"], one.log.generation)
    assert seen.latest >= offset and seen.latest <= one.log.durable and seen.horizon == one.log.horizon
    assert one.describe(after=seen.latest, shape=seen.table.version).schema_changed_at is None
    assert one.describe(after=seen.latest + 5).latest == seen.latest  # the caller sees that its log is another
    with pytest.raises(InvalidRequest, match="need `after`"):
        one.describe(wait_ms=5)
    with pytest.raises(NotFound):
        asyncio.run(one.ranges.describe(ANONYMOUS, "nowhere", "t"))


def test_describe_returns_the_first_schema_change_after_an_offset(one: One) -> None:
    start = one.describe()
    one.made.run("INSERT INTO t VALUES (1, 1)")
    one.made.run("CREATE TABLE u(k INTEGER PRIMARY KEY)")
    first = one.made.run("ALTER TABLE t ADD COLUMN w")
    second = one.made.run("ALTER TABLE t ADD COLUMN x")
    asked = {"shape": start.table.version}
    seen = one.describe(after=start.latest, **asked)
    assert seen.schema_changed_at == first
    assert seen.changed_to and (seen.changed_to.names, seen.table.names) == (("k", "v", "w"), ("k", "v", "w", "x"))
    seen = one.describe(after=first, **asked)
    assert (seen.schema_changed_at, seen.changed_to, seen.resnapshot) == (second, seen.table, False)
    assert one.describe(after=second, **asked).schema_changed_at is None
    assert one.describe(after=start.latest, shape=seen.table.version).schema_changed_at is None
    assert one.describe(**asked).schema_changed_at is None


def test_describe_during_a_schema_change_does_not_skip_it(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    start, status = one.describe(), one.source.status
    late, offsets = ["ALTER TABLE t ADD COLUMN w", "INSERT INTO t VALUES (1, 1, 1)"], []

    def altering() -> dict[str, Any]:
        """Return the status, and alter the table after its definition was read."""
        todo, late[:] = late[:], []
        for statement in todo:
            offsets.append(one.made.run(statement))
            assert one.catch_up(PATIENCE)
        return status()

    monkeypatch.setattr(one.source, "status", altering)
    seen = one.describe(after=start.latest, shape=start.table.version)
    assert seen.latest >= offsets[1] and seen.table.names == ("k", "v", "w")
    assert seen.schema_changed_at == offsets[0]


class LateLog:
    """A log that ends at an offset until it is caught up."""

    def __init__(self, log: Any, durable: int) -> None:
        self._log, self._durable = log, durable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    @property
    def durable(self) -> int:
        return min(int(self._log.durable), self._durable)

    def catch_up(self) -> None:
        self._durable = self._log.durable


def test_describe_waits_for_a_schema_change_that_is_not_in_the_log_yet(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = one.describe()
    inserted = one.made.run("INSERT INTO t VALUES (1, 1)")
    altered = one.made.run("ALTER TABLE t ADD COLUMN w")
    assert one.catch_up(PATIENCE)
    one.log.flush()
    log, waits = LateLog(one.log, inserted), []

    def wait_again(timeout: float) -> bool:
        """Time out at the first wait; the log is caught up at the second."""
        waits.append(timeout)
        if len(waits) > 1:
            log.catch_up()
        return len(waits) > 1

    monkeypatch.setattr(one, "log", log)
    monkeypatch.setattr(one, "catch_up", wait_again)
    seen = one.describe(after=start.latest, shape=start.table.version)
    assert (seen.schema_changed_at, seen.latest >= altered) == (altered, True)


def test_schema_change_that_lost_rows_has_resnapshot(one: One) -> None:
    start = one.describe()
    one.made.run("CREATE TABLE made(k INTEGER PRIMARY KEY, v, w)")
    one.made.run("INSERT INTO made VALUES (1, 2, 3)")
    one.made.run("DROP TABLE t")
    at = one.made.run("ALTER TABLE made RENAME TO t")
    seen = one.describe(after=at - 1, shape=start.table.version)
    assert seen.schema_changed_at is not None and seen.resnapshot


def test_waiting_describe_returns_once_the_next_offset_is_durable(one: One) -> None:
    start = one.describe()

    async def wait() -> Described:
        asked = asyncio.create_task(one.ranges.describe(ANONYMOUS, None, "t", after=start.latest, wait_ms=60_000))
        while not one.log.has_listeners:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(one.made.run, "INSERT INTO t VALUES (1, 1)")
        return await asyncio.wait_for(asked, PATIENCE)

    seen = asyncio.run(wait())
    assert seen.latest == start.latest + 1 <= one.log.durable
    assert not one.log.has_listeners
    assert one.describe(after=seen.latest, wait_ms=1).latest == seen.latest


def test_drain_ends_200_concurrent_waiting_describes(one: One) -> None:
    start = one.describe()

    async def many() -> list[Described]:
        asked = [
            asyncio.create_task(one.ranges.describe(ANONYMOUS, None, "t", after=start.latest, wait_ms=60_000))
            for _ in range(200)
        ]
        while one.ranges._waiting._held.total < len(asked):
            await asyncio.sleep(0.001)
        one.ranges.drain()
        return await asyncio.wait_for(asyncio.gather(*asked), PATIENCE)

    assert {seen.latest for seen in asyncio.run(many())} == {start.latest}


def test_number_of_concurrent_waits_is_limited(one: One) -> None:
    start = one.describe()
    one.ranges._waiting._most = 0
    with pytest.raises(LimitExceeded):
        one.describe(after=start.latest, wait_ms=5)
    assert one.describe(after=start.latest).latest == start.latest


class StuckLog:
    """A log whose disk is full: what is staged beyond offset 40 does not become durable."""

    generation, horizon, latest, durable, closed = "g", 1, 50, 40, (9 << 16, 50)

    def __init__(self) -> None:
        self.scanned: list[tuple[int, int | None]] = []

    def flush(self) -> int:
        raise StorageFull("no space left")

    def last_of(self, table: str) -> int:
        return 37

    def scan(self, *, after: int, upto: int | None = None, table: str | None = None) -> Iterator[Any]:
        self.scanned.append((after, upto))
        return iter(())


def test_describe_reports_only_durable_changes(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    log = StuckLog()
    monkeypatch.setattr(one, "log", log)
    monkeypatch.setattr(one, "catch_up", lambda timeout: True)
    seen = one.describe(after=45, shape=99)
    assert (seen.latest, seen.closed, log.scanned) == (40, 0, [(45, 45)])
    one.describe(after=7, shape=99)
    assert log.scanned[-1] == (7, 40)
    log.closed = (9 << 16, 40)
    assert one.describe().closed == 9 << 16
