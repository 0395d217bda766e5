"""Closed timestamps: they advance while there are listeners, and no later transaction is below one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.log.memory_log import MemoryLog
from tests.log.samples import transaction
from tests.sources.memory_source import MemorySource

from headwater.capture.capture import Capture
from headwater.capture.commit_timestamps import AHEAD_MS, Stamper
from headwater.errors import StorageFull
from headwater.log.disk.disk_log import DiskLog
from headwater.log.live.live_log import LiveLog
from headwater.log.log import Retention
from headwater.model.clock import MAX_COUNTER, MAX_MS, ts_ms, ts_of_ms, ts_text

MS = st.integers(0, MAX_MS - 1)


class Wall:
    """A wall clock that the test sets."""

    def __init__(self, ms: int = 1_000_000) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms


class FullLog(MemoryLog):
    """A log whose clock ceiling cannot be raised, as on a full disk, until `full` is False."""

    full = True

    def raise_ceiling(self, ts: int) -> None:
        if self.full:
            raise StorageFull("no space left")
        super().raise_ceiling(ts)


class CountingLog(MemoryLog):
    """A log that counts how often its clock ceiling was raised."""

    raised = 0

    def raise_ceiling(self, ts: int) -> None:
        self.raised += 1
        super().raise_ceiling(ts)


def ticks(after: int, steps: list[int]) -> list[int]:
    """Return the timestamps after `after`, with the wall clock at each of `steps` in milliseconds."""
    log, wall = MemoryLog(), Wall()
    log.raise_ceiling(after)
    stamper = Stamper(log, wall)
    found = []
    for wall.ms in steps:
        found.append(stamper.tick())
    return found


@given(MS, st.lists(MS, min_size=2, max_size=50))
def test_every_tick_is_above_the_last_one_and_not_behind_the_wall_clock(start: int, steps: list[int]) -> None:
    seen = ts_of_ms(start)
    for ms, ticked in zip(steps, ticks(seen, steps), strict=True):
        assert ticked > seen
        assert ts_ms(ticked) >= ms
        seen = ticked


def test_ticks_follow_wall_time_and_count_up_when_it_stalls_or_goes_back() -> None:
    assert list(map(ts_text, ticks(0, [5, 5, 7, 6, 8]))) == ["5.0", "5.1", "7.0", "7.1", "8.0"]


def test_tick_after_a_full_counter_advances_one_millisecond() -> None:
    assert list(map(ts_text, ticks(ts_of_ms(5) | MAX_COUNTER, [5]))) == ["6.0"]


def test_first_tick_is_above_the_ceiling_of_the_log() -> None:
    assert ticks(ts_of_ms(100), [3]) == [ts_of_ms(100) + 1]


def test_timestamp_after_a_failed_ceiling_write_is_within_the_stored_ceiling() -> None:
    log, wall = FullLog(), Wall()
    stamper = Stamper(log, wall)
    for _ in range(2):
        with pytest.raises(StorageFull):
            stamper.tick()
    log.full = False
    assert stamper.tick() <= log.clock_ceiling


def test_ticks_raise_the_durable_ceiling_once_per_ahead_interval() -> None:
    log, wall = CountingLog(), Wall()
    stamper = Stamper(log, wall)
    for _ in range(100):
        stamper.tick()
        wall.ms += 100
    assert log.raised == 10_000 // AHEAD_MS


moves = st.lists(
    st.tuples(st.sampled_from(["commit", "close", "flush", "crash", "restart"]), st.integers(-20_000, 20_000)),
    max_size=60,
)


@given(moves)
def test_commits_after_a_closed_time_have_later_times_even_if_the_wall_clock_goes_back(
    moves: list[tuple[str, int]],
) -> None:
    wall, wrapped = Wall(), MemoryLog()
    log = LiveLog(wrapped)
    stamper = Stamper(log, wall)
    closed = log.closed
    for move, skew in moves:
        wall.ms = max(wall.ms + skew, 1)
        if move == "commit":
            part = stamper.stamp(transaction(log.latest + 1, 2, ts=0))
            log.stage([part])
            assert part.ts > closed[0]
        elif move == "close":
            log.close_at(stamper.tick())
        elif move == "flush":
            log.flush()
        elif move == "crash":  # what was staged only comes again
            log = LiveLog(wrapped)
            stamper = Stamper(log, wall)
        else:
            log.unstage()
            log.restart(first=log.highest + 2, reason="restored")
            stamper = Stamper(log, wall)
        assert log.closed[0] >= closed[0]
        closed = log.closed
        later = [part for part in log.scan(after=log.horizon - 1) if part.upto > closed[1]]
        assert all(part.ts > closed[0] and part.first > closed[1] for part in later)


def test_idle_log_advances_its_closed_time_only_while_it_has_listeners(tmp_path: Path) -> None:
    log = LiveLog(DiskLog.open(tmp_path / "log.db"))
    capture = Capture(MemorySource("app"), log, retention=Retention(), flush_seconds=0.001)
    capture.start()
    before, ceiling = log.closed, log.clock_ceiling
    log.wait_beyond(0, 0.15)
    assert (log.closed, log.clock_ceiling) == (before, ceiling), "an idle server writes nothing"
    log.add_listener(lambda: None)
    seen = set()
    while len(seen) < 3:
        log.wait_beyond(0, 0.02)
        seen.add(log.closed)
    times = sorted(ts for ts, _ in seen - {before})
    assert all(ts_ms(later) - ts_ms(earlier) >= 90 for earlier, later in zip(times, times[1:], strict=False))
    assert {offset for _, offset in seen} == {0} and max(times) <= log.clock_ceiling < max(times) + ts_of_ms(
        2 * AHEAD_MS
    )
    capture.stop()
    log.close()
