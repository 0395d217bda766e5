"""Leases hold the horizon within bounds, and holders see when a lease ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.log.memory_log import MemoryLog
from tests.log.samples import fill, ids, transactions

from headwater.errors import OffsetExpired
from headwater.log.disk.disk_log import DiskLog
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention

FOR_EVER = 10**15
PLENTY = 10**12


class Wall:
    """A wall clock that stands still until the test sets it."""

    def __init__(self) -> None:
        self.ms = 1000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture(params=["memory", "disk"])
def log(request: pytest.FixtureRequest, tmp_path: Path, wall: Wall) -> Iterator[LiveLog]:
    wrapped = MemoryLog() if request.param == "memory" else DiskLog.open(tmp_path / "log.db")
    made = LiveLog(wrapped, keep_changes=4, retention_changes=10, now_ms=wall)
    yield made
    made.close()


def trim(log: LiveLog, **limits: int | None) -> None:
    """Apply retention until nothing is left to trim."""
    while log.retain(Retention(**{"changes": 10, **limits}), now_ms=0):
        pass


def test_changes_held_by_a_lease_stay_readable_until_it_is_released(log: LiveLog) -> None:
    fill(log, [1] * 5)
    log.hold("snapshot", 2, until_ms=FOR_EVER, max_bytes=PLENTY)
    fill(log, [1] * 50)
    assert (log.horizon, log.held("snapshot")) == (3, True)
    trim(log)
    assert (log.horizon, log.wrapped.horizon, ids(log.scan(after=2))) == (3, 3, list(range(3, 56)))
    with pytest.raises(OffsetExpired):
        log.read(after=1)
    log.release("snapshot")
    assert (log.horizon, log.held("snapshot")) == (46, False)
    trim(log)
    assert (log.wrapped.horizon, ids(log.scan(after=45))) == (46, list(range(46, 56)))


def test_retention_count_without_leases_is_applied_immediately(log: LiveLog) -> None:
    log.stage(transactions([1] * 30))
    assert log.horizon == 21


def test_lowest_lease_sets_the_horizon(log: LiveLog) -> None:
    fill(log, [1] * 8)
    log.hold("a", 5, until_ms=FOR_EVER, max_bytes=PLENTY)
    log.hold("b", 3, until_ms=FOR_EVER, max_bytes=PLENTY)
    fill(log, [1] * 50)
    assert log.horizon == 4
    log.release("b")
    assert log.horizon == 6
    log.release("b")
    log.release("never")
    trim(log)
    assert log.horizon == 6


def test_lease_on_expired_changes_is_refused(log: LiveLog) -> None:
    fill(log, [1] * 30)
    with pytest.raises(OffsetExpired) as caught:
        log.hold("late", 19, until_ms=FOR_EVER, max_bytes=PLENTY)
    assert (caught.value.horizon, log.held("late"), log.horizon) == (21, False, 21)
    log.hold("now", 20, until_ms=FOR_EVER, max_bytes=PLENTY)
    assert log.horizon == 21


def test_lease_ahead_of_retention_does_not_delay_the_horizon(log: LiveLog) -> None:
    fill(log, [1] * 30)
    log.hold("head", 30, until_ms=FOR_EVER, max_bytes=0)
    trim(log)
    assert (log.horizon, log.held("head")) == (21, True)
    fill(log, [1] * 5)
    trim(log)
    assert (log.horizon, log.held("head")) == (26, True)


def test_expired_lease_is_not_revived_by_a_clock_stepping_back(log: LiveLog, wall: Wall) -> None:
    fill(log, [1] * 5)
    log.hold("snapshot", 2, until_ms=5000, max_bytes=PLENTY)
    fill(log, [1] * 50)
    wall.ms = 4999
    assert (log.horizon, log.held("snapshot")) == (3, True)
    wall.ms = 5000
    assert log.horizon == 46
    wall.ms = 1000
    assert (log.horizon, log.held("snapshot")) == (46, False)
    trim(log)
    assert log.wrapped.horizon == 46


def test_lease_is_renewed_by_its_name(log: LiveLog, wall: Wall) -> None:
    fill(log, [1] * 5)
    log.hold("snapshot", 2, until_ms=5000, max_bytes=PLENTY)
    log.hold("snapshot", 4, until_ms=9000, max_bytes=PLENTY)
    fill(log, [1] * 50)
    wall.ms = 8000
    assert (log.horizon, log.held("snapshot")) == (5, True)


@pytest.mark.parametrize("limits", [{}, {"changes": None, "bytes": 500}, {"changes": None, "age_ms": 5}])
def test_lease_is_ended_when_it_holds_more_than_its_bytes(log: LiveLog, limits: dict[str, int | None]) -> None:
    fill(log, [1] * 5)
    log.hold("small", 2, until_ms=FOR_EVER, max_bytes=2000)
    log.hold("large", 2, until_ms=FOR_EVER, max_bytes=PLENTY)
    kept = []
    for now in range(400):
        fill(log, [1], ms=now)
        log.retain(Retention(**{"changes": 10, **limits}), now_ms=now)
        if log.held("small"):
            kept.append(log.wrapped.overdue(2))
    assert not log.held("small") and log.held("large")
    assert kept and 1900 < max(kept) <= 2000
    assert log.wrapped.horizon == 3 and log.overdue(2) > 3 * log.overdue(300) > 0


def test_blocks_beyond_a_retention_step_are_counted_against_a_lease(tmp_path: Path) -> None:
    disk = DiskLog.open(tmp_path / "log.db")
    log = LiveLog(disk)
    log.hold("snapshot", 0, until_ms=FOR_EVER, max_bytes=PLENTY)
    fill(log, [1] * 700)
    for _ in range(4):
        assert log.retain(Retention(changes=None, bytes=1000), now_ms=0) == 0
    assert disk.bytes - 1100 < log.overdue(0) <= disk.bytes - 900, "all but what the retention itself keeps"
    log.close()


def test_new_generation_ends_all_leases(log: LiveLog) -> None:
    fill(log, [1] * 5)
    log.hold("snapshot", 2, until_ms=FOR_EVER, max_bytes=PLENTY)
    log.restart(first=20, reason="restored")
    assert (log.held("snapshot"), log.horizon) == (False, 20)


steps = st.lists(
    st.tuples(
        st.sampled_from(["fill", "hold", "release", "retain", "tick"]), st.sampled_from("ab"), st.integers(0, 30)
    ),
    max_size=40,
)


@pytest.mark.slow
@given(steps)
def test_horizon_never_decreases_and_never_passes_a_held_lease(steps: list[tuple[str, str, int]]) -> None:
    wall = Wall()
    log = LiveLog(MemoryLog(), keep_changes=4, retention_changes=10, now_ms=wall)
    last, offsets = log.horizon, {"a": 0, "b": 0}
    act: dict[str, Callable[[str, int], object]] = {
        "fill": lambda name, size: fill(log, [1] * size),
        "release": lambda name, size: log.release(name),
        "retain": lambda name, size: log.retain(Retention(changes=10, bytes=900), now_ms=0),
        "tick": lambda name, size: setattr(wall, "ms", wall.ms + size),
        "hold": lambda name, size: log.hold(name, offsets[name], until_ms=wall.ms + 20, max_bytes=1500),
    }
    for step, name, size in steps:
        if step == "hold":
            offsets[name] = log.horizon - 1 + size
        act[step](name, size)
        assert log.horizon >= last
        last = log.horizon
        for other, offset in offsets.items():
            if log.held(other) and offset <= log.latest:
                assert ids(log.scan(after=offset)) == list(range(offset + 1, log.latest + 1))
