"""The contract of every log, checked on the disk log, the memory log and the live log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.log.memory_log import MemoryLog
from tests.log.samples import ITEMS, ORDERS, fill, flat, ids, in_parts, inserts, mixed, transaction, transactions
from tests.suite.examples import examples

from headwater.errors import InvalidRequest, OffsetExpired
from headwater.log.disk.block_codec import encode
from headwater.log.disk.disk_log import DiskLog
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Log, Retention
from headwater.log.transaction_parts import BLOCK_CHANGES
from headwater.model.change import Change, Op, Transaction

KEEP_ALL = Retention(changes=None)


class StagingLog(LiveLog):
    """A live log whose `append` only stages, so that all reads are of staged changes."""

    def append(self, parts: Iterable[Transaction], *, notes: Mapping[str, str] | None = None) -> int:
        latest = self.stage(parts)
        self.set_notes(**(notes or {}))
        return latest


def disk(folder: Path) -> Log:
    return DiskLog.open(folder / "log.db")


KINDS: dict[str, Callable[[Path], Log]] = {
    "memory": lambda folder: MemoryLog(),
    "disk": disk,
    "live": lambda folder: LiveLog(disk(folder), keep_changes=16),
    "staging": lambda folder: StagingLog(disk(folder), keep_changes=16),
    "live over memory": lambda folder: LiveLog(MemoryLog()),
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[[Path], Log]:
    return KINDS[request.param]


@pytest.fixture
def log(make: Callable[[Path], Log], tmp_path: Path) -> Iterator[Log]:
    made = make(tmp_path)
    yield made
    made.close()


def test_empty_log_has_horizon_one_and_latest_zero(log: Log) -> None:
    assert (log.horizon, log.latest, log.position, log.generation_first) == (1, 0, "", 1)
    assert log.generation and log.generation_reason == "created"
    assert log.read(after=0) == [] and list(log.scan(after=0)) == []
    assert log.offset_at(10**18) == 0 and log.first_whole(0) == 1
    assert log.retain(Retention(changes=1, bytes=1, age_ms=1), now_ms=10**13) == 0
    assert log.merge() == 0 and log.horizon == 1


def test_appended_transaction_is_read_back_unchanged(log: Log) -> None:
    changes = (
        Change(Op.INSERT, ORDERS, None, (1, "a")),
        Change(Op.UPDATE, ORDERS, (1, "a"), (1, None)),
        Change(Op.SCHEMA_CHANGE, ITEMS, None, None, "ALTER TABLE items …", True),
        Change(Op.DELETE, ITEMS, (7, 1, -0.0), None),
        Change(Op.TRUNCATE, ORDERS),
    )
    sent = Transaction("a1", changes, 1, ts=77 << 16, commit_ts_ms=76, position="0/16B")
    assert log.append([sent]) == 5
    assert log.read(after=0) == [sent]
    assert (log.latest, log.horizon, log.position) == (5, 1, "0/16B")


def test_log_read_excludes_after_and_includes_upto(log: Log) -> None:
    fill(log, [1, 3, 1, 2])
    assert ids(log.read(after=2, upto=5)) == [3, 4, 5]
    assert ids(log.scan(after=2, upto=5)) == [3, 4, 5]
    assert ids(log.read(after=0, upto=99)) == [1, 2, 3, 4, 5, 6, 7]
    assert log.read(after=5, upto=5) == log.read(after=5, upto=3) == log.read(after=7) == []
    assert log.read(after=99) == [] and log.read(after=1, limit=0) == []


def test_log_read_without_a_limit_returns_at_most_a_block(log: Log) -> None:
    fill(log, [1, 3, BLOCK_CHANGES + 700, 2, 40])
    at, steps = 2, []
    while parts := log.read(after=at, limit=None):
        assert parts[0].first == at + 1
        steps.append(parts[-1].upto - at)
        at = parts[-1].upto
    assert at == log.latest and max(steps) <= BLOCK_CHANGES and len(steps) < 10
    assert ids(log.read(after=2, upto=3, limit=None)) == [3]


def test_log_read_limit_counts_changes_and_cuts_a_transaction(log: Log) -> None:
    fill(log, [1, 4])
    (one, part) = log.read(after=0, limit=3)
    assert (one.id, part.id, ids([one, part])) == ("t1", "t2", [1, 2, 3])
    assert (part.start, part.last) == (0, False)
    (rest,) = log.read(after=3)
    assert (rest.first, rest.start, rest.last, ids([rest])) == (4, 2, True, [4, 5])


def test_transaction_appended_in_parts_is_read_back_as_one_transaction(log: Log) -> None:
    whole = transaction(1, 1300)
    assert log.append(in_parts(whole, 400)) == 1300
    assert flat(log.scan(after=0)) == flat([whole])
    found = list(log.scan(after=0))
    assert [part.last for part in found] == [False] * (len(found) - 1) + [True]
    assert flat(log.read(after=700, upto=900)) == flat([whole])[700:900]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([transaction(3)], "continues at 2"),
        ([transaction(1)], "continues at 2"),
        ([transaction(2), transaction(4)], "continues at 3"),
        ([transaction(2, ts=0)], "time"),
        ([Transaction("empty", (), 2, 5)], "without changes"),
        ([transaction(2, start=1)], "in the middle"),
        ([transaction(2, 4).cut(0, 3)], "last part is missing"),
        ([transaction(2, 4).cut(0, 3), transaction(4, ts=9)], "before the rest of 't2'"),
        ([transaction(2, 4).cut(0, 3), Transaction("t2", inserts(4, 1), 4, 2, 0, 3)], "does not follow"),
    ],
)
def test_append_that_does_not_continue_the_log_is_refused_and_keeps_nothing(
    log: Log, parts: list[Transaction], reason: str
) -> None:
    fill(log, [1])
    with pytest.raises(InvalidRequest, match=reason):
        log.append(parts, notes={"nonce": "x"})
    assert (log.latest, ids(log.scan(after=0)), log.note("nonce")) == (1, [1], "")
    assert log.append([transaction(2)]) == 2


def test_append_that_fails_midway_keeps_nothing(log: Log) -> None:
    def breaking() -> Iterator[Transaction]:
        yield from transactions([700])
        raise RuntimeError("the source went away")

    with pytest.raises(RuntimeError):
        log.append(breaking())
    assert (log.latest, log.read(after=0)) == (0, [])
    assert log.append([transaction(1)]) == 1


def test_empty_append_succeeds_and_keeps_its_notes(log: Log) -> None:
    assert log.append([]) == 0 and log.append(iter([]), notes={"a": "1"}) == 0
    assert log.note("a") == "1"


def test_scan_ignores_changes_appended_after_its_start(log: Log) -> None:
    fill(log, [2, 600])
    scan = log.scan(after=0)
    seen = ids([next(scan)])
    fill(log, [5])
    assert seen + ids(scan) == list(range(1, 603))
    assert ids(log.scan(after=602)) == [603, 604, 605, 606, 607]


def test_retention_by_count_is_exact_to_the_change(log: Log) -> None:
    fill(log, [3, 4, 700])
    log.retain(Retention(changes=5), now_ms=0)
    assert (log.horizon, log.latest) == (703, 707)
    assert ids(log.read(after=702)) == [703, 704, 705, 706, 707]
    with pytest.raises(OffsetExpired) as caught:
        log.read(after=701)
    assert (caught.value.after, caught.value.horizon, caught.value.latest) == (701, 703, 707)
    with pytest.raises(OffsetExpired):
        log.scan(after=0)


def test_horizon_never_decreases(log: Log) -> None:
    fill(log, [10])
    log.retain(Retention(changes=4), now_ms=0)
    assert log.horizon == 7
    log.retain(Retention(changes=9), now_ms=0)
    log.retain(KEEP_ALL, now_ms=0)
    assert log.horizon == 7


def test_retention_of_zero_changes_keeps_position_and_offsets(log: Log) -> None:
    fill(log, [10])
    log.retain(Retention(changes=0), now_ms=0)
    assert (log.horizon, log.latest, log.position) == (11, 10, "p10")
    assert log.read(after=10) == []
    fill(log, [2])
    assert ids(log.read(after=10)) == [11, 12]


def test_retention_by_age_drops_blocks_by_commit_time(log: Log) -> None:
    for ms in (1000, 2000, 3000):
        log.append([transaction(log.latest + 1, 2, ms=ms)])
        log.retain(KEEP_ALL, now_ms=0)  # a live log flushes here: one block for each time
    policy = Retention(changes=None, age_ms=500)
    log.retain(policy, now_ms=2500)
    assert log.horizon == 3
    log.retain(policy, now_ms=2501)
    assert log.horizon == 5
    log.retain(policy, now_ms=10_000)
    assert (log.horizon, log.latest) == (7, 6)


def test_retention_by_bytes_drops_the_oldest_blocks_and_never_the_newest(log: Log) -> None:
    sent = []
    for _ in range(6):
        sent += fill(log, [500])
        log.retain(KEEP_ALL, now_ms=0)
    last_three = sum(len(block.data) for block in encode(sent[3:]))
    log.retain(Retention(changes=None, bytes=last_three), now_ms=0)
    assert log.horizon == 1501
    log.retain(Retention(changes=None, bytes=last_three - 1), now_ms=0)
    assert log.horizon == 2001
    log.retain(Retention(changes=None, bytes=1), now_ms=0)
    assert (log.horizon, log.latest) == (2501, 3000)


def test_retention_frees_space_in_steps_and_keeps_the_retained_changes(log: Log) -> None:
    fill(log, [1] * 700)
    log.retain(KEEP_ALL, now_ms=0)
    freed = []
    while step := log.retain(Retention(changes=10), now_ms=0):
        assert log.horizon == 691
        freed.append(step)
    assert sum(freed) <= 690
    assert ids(log.scan(after=690)) == list(range(691, 701))


def test_offset_at_a_time_is_the_end_of_the_last_transaction_up_to_that_time(log: Log) -> None:
    log.append([transaction(1, 3, ts=100), transaction(4, 700, ts=200)])
    log.append([transaction(704, ts=200), transaction(705, ts=300)])
    assert [log.offset_at(ts) for ts in (0, 99, 100, 199, 200, 299, 300, 2**62)] == [
        0, 0, 3, 3, 704, 704, 705, 705,
    ]  # fmt: skip
    log.retain(Retention(changes=2), now_ms=0)
    assert [log.offset_at(ts) for ts in (0, 100, 200, 300)] == [703, 703, 704, 705]


def test_first_whole_skips_the_rest_of_a_cut_transaction(log: Log) -> None:
    fill(log, [3, 1500, 2, 1])
    assert [log.first_whole(n) for n in (0, 1, 2, 4, 5, 1503, 1504, 1505, 1506, 1507, 2000)] == [
        1, 1, 4, 4, 1504, 1504, 1504, 1506, 1506, 1507, 1507,
    ]  # fmt: skip
    log.retain(Retention(changes=1000), now_ms=0)
    assert log.first_whole(0) == 1504


def test_reach_returns_a_step_of_about_the_requested_size(log: Log) -> None:
    fill(log, [3, 4, 1500, 2, 1])
    if isinstance(log, LiveLog):
        log.flush()  # only what is durable counts
    reach = partial(log.reach, bytes=2**40)
    assert [reach(0, changes=n) for n in (1, 3, 4, 7, 2000)] == [1, 3, 7, 7, 1510]
    assert reach(3, changes=1) == 4, "a transaction of four is much larger than a step of one"
    assert [reach(7, changes=n) for n in (100, 700, 800, 1500)] == [107, 707, 1507, 1507]
    assert [reach(n, changes=5) for n in (1507, 1508, 1510)] == [1510, 1510, 1510]
    assert log.reach(7, changes=1500, bytes=1) == 8, "at least one"
    small = log.reach(7, changes=1500, bytes=4_000)
    assert 8 < small < 1000 and log.reach(small, changes=1500, bytes=4_000) > small


def test_reach_of_one_table_counts_only_its_own_changes(log: Log) -> None:
    quiet = [["orders"] * 1000, ["items"] * 10, ["orders"] * 1000, ["items"] * 10]
    for part in mixed(1, quiet):
        log.append([part])
    if isinstance(log, LiveLog):
        log.flush()
    reach = partial(log.reach, bytes=2**40)
    ends = [0]
    while ends[-1] < log.latest:
        ends.append(reach(ends[-1], changes=5, table="items"))
    assert 2 < len(ends) < 9, "two transactions of ten changes, each in one step or a few: not 400 steps"
    assert reach(0, changes=20, table="items") == reach(0, changes=5000, table="orders") == 2020
    assert reach(0, changes=1000, table="orders") >= 1000
    assert reach(0, changes=7, table="unknown") == 2020


names = st.sampled_from(["orders", "items"])


@pytest.mark.slow
@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tables=st.lists(st.builds(lambda name, count: [name] * count, names, st.integers(1, 400)), min_size=1, max_size=25),
    keep=st.integers(1, 4000),
    merged=st.booleans(),
)
def test_ends_and_scans_of_tables_match_a_list_of_the_changes(
    make: Callable[[Path], Log],
    tmp_path_factory: pytest.TempPathFactory,
    tables: list[list[str]],
    keep: int,
    merged: bool,
) -> None:
    log = make(tmp_path_factory.mktemp("log"))
    owners = [name for each in tables for name in each]
    for part in mixed(1, tables):
        log.append([part])
        if isinstance(log, LiveLog):
            log.flush()
        assert log.last_of(part.changes[-1].table.name) == part.upto
    while merged and log.merge():
        pass
    while log.retain(Retention(changes=keep), now_ms=0):
        pass
    for table in ("orders", "items", "unknown"):
        ends = [offset for offset, name in enumerate(owners, 1) if name == table]
        last = ends[-1] if ends else 0
        assert log.last_of(table) == last or last <= log.last_of(table) < log.horizon
        found = flat(part for part in log.scan(after=log.horizon - 1, table=table))
        offsets = [offset for offset, *_, change in found if change.table.name == table]  # type: ignore[attr-defined]
        assert offsets == [offset for offset in ends if offset >= log.horizon]
    log.close()


def test_clock_ceiling_only_rises_and_covers_every_appended_time(log: Log) -> None:
    log.raise_ceiling(50)
    log.raise_ceiling(40)
    assert log.clock_ceiling == 50
    log.append([transaction(1, ts=60)])
    assert log.clock_ceiling == 60


def test_notes_set_directly_and_by_append_are_kept(log: Log) -> None:
    assert log.note("nonce") == ""
    log.set_notes(nonce="1", source="shop.db")
    log.append([transaction(1)], notes={"nonce": "2"})
    assert (log.note("nonce"), log.note("source")) == ("2", "shop.db")


def test_new_generation_starts_at_its_first_offset_and_drops_the_old_changes(log: Log) -> None:
    fill(log, [4])
    old = log.generation
    log.set_notes(source="shop.db")
    name = log.restart(first=6, reason="the file was restored")
    assert name == log.generation != old
    assert (log.generation_reason, log.generation_first) == ("the file was restored", 6)
    assert (log.horizon, log.latest, log.position, log.note("source")) == (6, 5, "", "shop.db")
    assert (log.read(after=5), log.offset_at(10**9), log.first_whole(1)) == ([], 5, 6)
    with pytest.raises(OffsetExpired):
        log.read(after=3)
    fill(log, [2])
    assert ids(log.read(after=5)) == [6, 7]
    while log.retain(KEEP_ALL, now_ms=0):
        pass
    assert (ids(log.scan(after=5)), log.position, log.clock_ceiling) == ([6, 7], "p7", 6)


def test_new_generation_with_a_used_offset_is_refused(log: Log) -> None:
    fill(log, [4])
    for first in (1, 4):
        with pytest.raises(InvalidRequest, match="after 4"):
            log.restart(first=first, reason="no")
    assert log.latest == 4
    log.restart(first=5, reason="yes")
    assert log.latest == 4 and log.read(after=4) == []


sizes = st.lists(st.one_of(st.integers(1, 4), st.integers(1, 900)), min_size=1, max_size=25)


@pytest.mark.slow
@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=sizes, repeat=st.sampled_from([1, 1, 40]), keep=st.integers(1, 3000))
def test_merge_leaves_every_read_unchanged(
    make: Callable[[Path], Log],
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    repeat: int,
    keep: int,
) -> None:
    log = make(tmp_path_factory.mktemp("log"))
    sent = flat(fill(log, (sizes * repeat)[:60]))
    log.retain(Retention(changes=keep), now_ms=0)
    after = log.horizon - 1
    whole = [log.first_whole(n) for n in range(0, log.latest, 7)]
    times = [log.offset_at(n) for n in range(0, log.latest, 7)]
    while log.merge():
        pass
    assert flat(log.scan(after=after)) == sent[after:]
    middle = (after + log.latest) // 2
    assert flat(log.read(after=middle, limit=300)) == sent[middle : middle + 300]
    assert [log.first_whole(n) for n in range(0, log.latest, 7)] == whole
    assert [log.offset_at(n) for n in range(0, log.latest, 7)] == times
    assert log.position == f"p{log.latest}"
    log.close()


@pytest.mark.parametrize("make", [KINDS["disk"], KINDS["live"]], ids=["disk", "live"])
def test_reopened_log_has_the_same_changes_and_state(make: Callable[[Path], Log], tmp_path: Path) -> None:
    log = make(tmp_path)
    sent = fill(log, [3, 700, 1])
    log.set_notes(nonce="n")
    log.raise_ceiling(10**6)
    log.retain(Retention(changes=600), now_ms=0)
    known = (log.generation, log.horizon, log.latest, log.position, log.clock_ceiling, log.note("nonce"))
    log.close()
    log = make(tmp_path)
    assert known == (
        log.generation, log.horizon, log.latest, log.position, log.clock_ceiling, log.note("nonce"),
    )  # fmt: skip
    assert flat(log.scan(after=log.horizon - 1)) == flat(sent)[log.horizon - 1 :]
    name = log.restart(first=log.latest + 2, reason="lost")
    log.close()
    log = make(tmp_path)
    assert (log.generation, log.generation_reason, log.latest, log.position) == (name, "lost", 705, "")
    log.close()
