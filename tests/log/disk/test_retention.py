"""The decisions of retention and merging: where the horizon moves, and which blocks are joined."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.log.disk.block_codec import MAX_RAW
from headwater.log.disk.retention import EvictionProgress, RetentionLimits, next_horizon, runs
from headwater.log.log import BlockInfo, Retention
from headwater.log.transaction_parts import BLOCK_CHANGES


def blocks(*counts: int, size: int = 100) -> list[BlockInfo]:
    first, found = 1, []
    for number, count in enumerate(counts):
        found.append(BlockInfo(first, count, size, size * 3, commit_ms_last=1000 * number))
        first += count
    return found


def horizon(retention: Retention, held: list[BlockInfo], now: int = 0, at: int = 1) -> int:
    total = sum(block.bytes for block in held)
    return next_horizon(retention, held, horizon=at, latest=held[-1].upto, total=total, now_ms=now)


def test_retention_without_limits_keeps_every_change() -> None:
    assert horizon(Retention(changes=None), blocks(10, 10)) == 1


def test_retention_by_count_moves_the_horizon_inside_a_block() -> None:
    assert horizon(Retention(changes=7), blocks(10, 10)) == 14


def test_retention_by_bytes_moves_the_horizon_between_blocks() -> None:
    assert horizon(Retention(changes=None, bytes=250), blocks(10, 10, 10, 10)) == 21


def test_retention_by_age_stops_at_the_first_young_block() -> None:
    held = blocks(10, 10, 10)
    assert horizon(Retention(changes=None, age_ms=500), held, now=1500) == 11
    late = [held[1], held[0], held[2]]  # a source whose clock stepped back
    assert horizon(Retention(changes=None, age_ms=500), late, now=1500) == 1


def test_strictest_retention_limit_sets_the_horizon() -> None:
    assert horizon(Retention(changes=25, bytes=150, age_ms=10**9), blocks(10, 10, 10, 10)) == 31


def test_blocks_below_the_horizon_are_not_counted_by_retention_bytes() -> None:
    assert horizon(Retention(changes=None, bytes=200), blocks(10, 10, 10, 10), at=25) == 25


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=20),
    st.integers(0, 400) | st.none(),
    st.integers(0, 2500) | st.none(),
    st.integers(0, 20_000) | st.none(),
    st.integers(1, 100),
)
def test_horizon_never_decreases_and_never_passes_the_head(
    counts: list[int], changes: int | None, size: int | None, age: int | None, at: int
) -> None:
    held = blocks(*counts)
    at = min(at, held[-1].upto + 1)
    found = horizon(Retention(changes, size, age), held, now=15_000, at=at)
    assert at <= found <= held[-1].upto + 1
    if changes is not None:
        assert found >= held[-1].upto - changes + 1


def test_small_neighbour_blocks_are_joined_up_to_a_full_block() -> None:
    assert [len(run) for run in runs(blocks(*[1] * 1100))] == [512, 512]


def test_full_blocks_are_not_joined_and_the_newest_run_is_kept_open() -> None:
    found = [[block.count for block in run] for run in runs(blocks(512, 272, 512, 1, 1, 511, 2))]
    assert found == [[512], [272], [512], [1, 1], [511]]


def test_blocks_of_large_rows_are_not_joined_beyond_the_block_bytes() -> None:
    found = list(runs(blocks(1, 1, 1, 1, 1, size=MAX_RAW // 6)))
    assert [len(run) for run in found] == [2, 2]


@given(st.lists(st.integers(1, BLOCK_CHANGES), max_size=60))
def test_each_run_has_at_most_a_block_of_changes_and_the_next_block_would_exceed_it(counts: list[int]) -> None:
    found = [sum(block.count for block in run) for run in runs(blocks(*counts, size=1))]
    heads = [run[0].count for run in runs(blocks(*counts, size=1))]
    assert all(count <= BLOCK_CHANGES for count in found)
    assert all(one + head > BLOCK_CHANGES for one, head in zip(found, heads[1:], strict=False))


def test_cursor_share_counts_the_bytes_of_its_unread_blocks() -> None:
    kept = RetentionLimits(Retention(changes=None, bytes=400), blocks(10, 10, 10))
    assert [kept.spent(cursor, now_ms=0).share for cursor in (0, 9, 10, 29, 30)] == [0.75, 0.75, 0.5, 0.25, 0.0]
    assert kept.spent(0, now_ms=0).remaining == 10  # 100 bytes are left, and ten changes have as many


def test_cursor_share_counts_the_age_of_its_oldest_unread_block() -> None:
    kept = RetentionLimits(Retention(changes=None, age_ms=10_000), blocks(10, 10, 10))
    assert kept.spent(5, now_ms=5_000) == EvictionProgress(0.5, None, 10_000)
    assert kept.spent(15, now_ms=5_000) == EvictionProgress(0.4, None, 11_000)
    assert kept.spent(30, now_ms=5_000) == EvictionProgress()


def test_cursor_share_above_1_is_exactly_a_cursor_below_the_horizon() -> None:
    """What `next_horizon` drops, and no more, has spent its limit."""
    for retention in (Retention(changes=None, bytes=250), Retention(changes=None, age_ms=1_500)):
        held = blocks(10, 10, 10, 10)
        kept, first = RetentionLimits(retention, held), horizon(retention, held, now=3_000)
        for cursor in (0, 10, 20):
            assert (kept.spent(cursor, now_ms=3_000).share > 1) == (cursor + 1 < first), cursor
