"""Start positions: every keyword, offset and time gives a cursor after which no change is missing, or an error."""

from __future__ import annotations

import pytest
from tests.feeds.feed_database import Fed, insert

from headwater.errors import InvalidRequest, OffsetExpired, Unavailable
from headwater.feeds.deliver.start_position import at_time, check_cursor, check_reached, cursor_of
from headwater.feeds.subscriptions.subscribe_table import EARLIEST, LATEST, OFFSET, SNAPSHOT, TS, Start
from headwater.log.log import Retention


def filled(sizes: tuple[int, ...] = (3, 1, 4, 2), *, part: int = 512) -> Fed:
    """Transactions at the offsets 1–3, 4, 5–8 and 9–10, at times `first << 16`."""
    fed = Fed(part=part)
    id = 0
    for size in sizes:
        fed.commit(*(insert(id + number) for number in range(size)))
        id += size
    fed.log.flush()
    return fed


def test_start_keywords_give_their_cursors() -> None:
    fed = filled()
    for whole in (False, True):
        assert cursor_of(fed.log, Start(), whole=whole) == 10
        assert cursor_of(fed.log, Start(LATEST), whole=whole) == 10
        assert cursor_of(fed.log, Start(SNAPSHOT), whole=whole) == 10
        assert cursor_of(fed.log, Start(EARLIEST), whole=whole) == 0


def test_empty_log_starts_at_its_beginning() -> None:
    fed = Fed()
    for kind in (LATEST, EARLIEST, SNAPSHOT):
        assert cursor_of(fed.log, Start(kind), whole=True) == 0
    assert cursor_of(fed.log, Start(TS, 5), whole=False) == 0
    assert cursor_of(fed.log, Start(OFFSET, 0), whole=False) == 0


@pytest.mark.parametrize("part", [2, 512])
@pytest.mark.parametrize(
    ("kept", "first", "whole"), [(10, 1, 1), (9, 2, 4), (7, 4, 4), (6, 5, 5), (4, 7, 9), (1, 10, 11)]
)
def test_earliest_is_the_horizon_or_the_first_whole_transaction_after_it(
    kept: int, first: int, whole: int, part: int
) -> None:
    fed = filled(part=part)
    fed.trim(kept)
    assert cursor_of(fed.log, Start(EARLIEST), whole=False) == first - 1
    assert cursor_of(fed.log, Start(EARLIEST), whole=True) == whole - 1


def test_offset_outside_the_log_is_rejected() -> None:
    fed = filled()
    fed.trim(6)
    for offset in (4, 7, 10):
        assert cursor_of(fed.log, Start(OFFSET, offset), whole=False) == offset
    with pytest.raises(InvalidRequest, match=r"start\.offset 11"):
        cursor_of(fed.log, Start(OFFSET, 11), whole=False)
    with pytest.raises(OffsetExpired) as gone:
        cursor_of(fed.log, Start(OFFSET, 3), whole=False)
    assert (gone.value.horizon, gone.value.latest) == (5, 10)
    assert check_cursor(fed.log, 4, "x") == 4


def test_cursor_ahead_of_the_log_is_invalid_or_unavailable() -> None:
    fed = filled()
    check_reached(fed.log, 10, "offset", True)
    with pytest.raises(InvalidRequest, match="offset 11"):
        check_reached(fed.log, 11, "offset", True)
    with pytest.raises(Unavailable):
        check_reached(fed.log, 11, "offset", False)


def time_of(first: int) -> int:
    return first << 16


@pytest.mark.parametrize(
    ("ts", "cursor"),
    [
        (0, 0),
        (time_of(1) - 1, 0),
        (time_of(1), 3),
        (time_of(4) - 1, 3),
        (time_of(4), 4),
        (time_of(5) + 9, 8),
        (time_of(9), 10),
        (time_of(99), 10),
    ],
)
@pytest.mark.parametrize("part", [2, 512])
def test_time_starts_after_the_last_transaction_at_or_before_it(ts: int, cursor: int, part: int) -> None:
    assert at_time(filled(part=part).log, ts) == cursor


def test_time_before_the_horizon_is_rejected_if_changes_were_evicted() -> None:
    fed = filled()
    fed.trim(6)  # begins with the transaction at 5
    with pytest.raises(OffsetExpired):
        at_time(fed.log, time_of(1))
    with pytest.raises(OffsetExpired):
        at_time(fed.log, time_of(5) - 1)
    assert at_time(fed.log, time_of(5)) == 8


def test_time_inside_a_partly_evicted_transaction_is_rejected() -> None:
    fed = filled()
    fed.trim(4)  # begins inside the transaction at 5
    with pytest.raises(OffsetExpired):
        at_time(fed.log, time_of(5) - 1)
    assert at_time(fed.log, time_of(5)) == 8


def test_old_time_is_rejected_if_all_changes_were_evicted() -> None:
    """A log that evicted everything by age does not know which changes followed a time."""
    fed = filled()
    fed.log.retain(Retention(changes=None, age_ms=1), now_ms=10**9)
    assert fed.log.horizon == 11
    with pytest.raises(OffsetExpired):
        at_time(fed.log, time_of(4))
    assert at_time(fed.log, fed.log.clock_ceiling) == 10


def test_time_before_a_generation_starts_at_its_beginning() -> None:
    fed = filled()
    fed.new_generation()
    first = fed.log.generation_first
    fed.commit(insert(100))
    assert at_time(fed.log, 0) == first - 1
    assert cursor_of(fed.log, Start(EARLIEST), whole=True) == first - 1
    with pytest.raises(OffsetExpired):
        cursor_of(fed.log, Start(OFFSET, 10), whole=False)


def test_future_time_is_rejected_beyond_the_clock_skew() -> None:
    fed, now_ms = filled(), 5_000_000
    assert at_time(fed.log, now_ms + 60_000 << 16, now_ms=lambda: now_ms) == 10
    with pytest.raises(InvalidRequest, match=r"start\.ts 5060001\.0 is in the future") as refused:
        at_time(fed.log, now_ms + 60_001 << 16, "start.ts", now_ms=lambda: now_ms)
    assert refused.value.hint
    assert at_time(fed.log, time_of(9), now_ms=lambda: -100_000) == 10, "the log itself has come that far"
    with pytest.raises(InvalidRequest, match=r"start\.ts"):
        cursor_of(fed.log, Start(TS, 2**63 - 1), whole=False)
