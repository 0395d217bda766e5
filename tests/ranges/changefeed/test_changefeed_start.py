"""The start offset of a change feed, and the checkpoint time at any offset of the log."""

from __future__ import annotations

import pytest
from tests.feeds.feed_database import Fed, insert

from headwater.errors import InvalidRequest, OffsetExpired
from headwater.model.clock import ts_text
from headwater.ranges.changefeed.changefeed import FeedStart, begin, resolved, threshold


def filled(*, part: int = 512) -> Fed:
    """Return a feed with transactions at the offsets 1–3, 4, 5–8 and 9–10, at times `first << 16`."""
    fed = Fed(part=part)
    id = 0
    for size in (3, 1, 4, 2):
        fed.commit(*(insert(id + number) for number in range(size)))
        id += size
    fed.log.flush()
    return fed


def test_feed_from_a_time_excludes_changes_at_that_time() -> None:
    log = filled().log
    for ts, offset in ((0, 0), (1 << 16, 3), ((4 << 16) - 1, 3), (4 << 16, 4), (5 << 16, 8), (9 << 16, 10)):
        assert begin(log, FeedStart(ts=ts)) == offset
    assert begin(log, FeedStart()) == 10 and begin(log, FeedStart(offset=6)) == 6


@pytest.mark.parametrize("part", [2, 512])
def test_trimmed_base_is_rejected_with_the_oldest_available_time(part: int) -> None:
    fed = filled(part=part)
    fed.trim(4)  # 7 is the first, in the midst of a transaction; 9 begins one
    oldest = (9 << 16) - 1
    assert threshold(fed.log) == oldest
    assert begin(fed.log, FeedStart(ts=oldest)) == 8 and begin(fed.log, FeedStart(offset=6)) == 6
    for base in (FeedStart(ts=oldest - 1), FeedStart(ts=0), FeedStart(offset=5)):
        with pytest.raises(OffsetExpired) as refused:
            begin(fed.log, base)
        assert refused.value.extra["threshold"] == ts_text(oldest)
        assert refused.value.extra["resnapshot_reason"] == "wal_horizon_exceeded"


def test_feed_on_a_fully_trimmed_log_starts_only_at_or_after_the_last_trimmed_time() -> None:
    fed = filled()
    fed.trim(0)
    with pytest.raises(OffsetExpired):
        begin(fed.log, FeedStart(ts=fed.log.clock_ceiling - 1))
    assert begin(fed.log, FeedStart(ts=fed.log.clock_ceiling)) == 10


def test_base_of_another_generation_is_rejected() -> None:
    fed = filled()
    old = fed.log.generation
    fed.log.restart(first=20, reason="restored")
    for base in (
        FeedStart(ts=9 << 16),
        FeedStart(ts=9 << 16, generation=old),
        FeedStart(offset=10),
        FeedStart(offset=19, generation=old),
    ):
        with pytest.raises(OffsetExpired) as lost:
            begin(fed.log, base)
        assert (fed.log.generation in lost.value.message) == bool(base.generation or base.offset)
    assert begin(fed.log, FeedStart(ts=9 << 16, generation=fed.log.generation)) == 19  # told by it: nothing is missing
    assert begin(fed.log, FeedStart(offset=19)) == begin(fed.log, FeedStart()) == 19


def test_base_in_the_future_is_rejected() -> None:
    log = filled().log
    now = 1_000_000
    assert begin(log, FeedStart(ts=(now + 59_000) << 16), now_ms=lambda: now) == 10
    with pytest.raises(InvalidRequest, match="future"):
        begin(log, FeedStart(ts=(now + 61_000) << 16), now_ms=lambda: now)
    with pytest.raises(InvalidRequest, match="beyond"):
        begin(log, FeedStart(offset=11))


def test_resolved_time_is_below_all_following_changes() -> None:
    """The time is below all following changes, and inside a transaction below all of its changes."""
    log = filled().log
    times = {1: 1, 2: 1, 3: 1, 4: 4, 5: 5, 6: 5, 7: 5, 8: 5, 9: 9, 10: 9}
    for cursor in range(10):
        assert resolved(log, cursor, 0) == (times[cursor + 1] << 16) - 1
    assert resolved(log, 10, 9 << 16) >= 9 << 16
    log.close_at(50 << 16)
    assert resolved(log, 10, 9 << 16) == 50 << 16
    assert resolved(log, 8, 5 << 16) == (9 << 16) - 1, "closed further on says nothing of here"
