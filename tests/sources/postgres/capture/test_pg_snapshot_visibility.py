"""Which part of the log a snapshot sees, in all orders of commit and visibility, and around the wraparound of ids."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.suite.examples import examples

from headwater.errors import Unavailable
from headwater.sources.postgres.snapshot_visibility import Snapshot, Visibility


def test_snapshot_is_parsed_from_its_text() -> None:
    assert Snapshot.of("10:20:10,14") == Snapshot(10, 20, frozenset({10, 14}))
    assert Snapshot.of("10:10:") == Snapshot(10, 10)


def test_transaction_ids_are_compared_across_their_wraparound() -> None:
    start = (7 << 32) - 3
    snapshot = Snapshot(start, start + 8, frozenset({start + 1, start + 6}))
    seen = [snapshot.sees((start + n) % 2**32) for n in range(-2, 10)]
    assert seen == [True, True, True, False, True, True, True, True, False, True, False, False]
    assert snapshot.sees((start - 2**31 + 10) % 2**32) and not snapshot.sees((start + 2**31 - 10) % 2**32)


@given(
    st.permutations(range(12)),
    st.sets(st.integers(0, 11)),
    st.integers(0, 14),
    st.integers(0, 2**33),
)
@examples(300)
def test_offset_of_a_snapshot_is_before_the_first_unseen_transaction(
    order: list[int], running: set[int], end: int, base: int
) -> None:
    high = base + end
    snapshot = Snapshot(base, high, frozenset(base + n for n in running if n < end))
    visibility = Visibility(100)
    visible = [n < end and n not in running for n in order]
    for place, n in enumerate(order):
        visibility.log((base + n) % 2**32, 101 + place)
    first = visible.index(False) if False in visible else len(order)
    assert visibility.offset_seen(snapshot) == 100 + first
    assert visibility.is_prefix(snapshot) == (not any(visible[first:]))


def test_transactions_are_evicted_only_when_every_reader_sees_them() -> None:
    visibility = Visibility(0)
    for n in range(1, 201):
        visibility.log(n, n)
    with visibility.reading():
        old = Snapshot(50, 201, frozenset({50}))
        with visibility.reading():
            assert visibility.offset_seen(Snapshot(201, 201)) == 200
        assert visibility.visible == 0
        visibility.notice(Snapshot(201, 201))
        assert visibility.visible == 200 and len(visibility) == 200  # a reader that began before is still here
        assert visibility.offset_seen(old) == 49
        assert not visibility.is_prefix(old)
    assert len(visibility) == 0
    assert visibility.offset_seen(Snapshot(201, 201)) == 200


def test_transaction_resent_after_a_cut_is_logged_at_its_offset_again() -> None:
    visibility = Visibility(0)
    for n in range(1, 6):
        visibility.log(n, n * 10)
    visibility.cut(30)
    assert visibility.offset_seen(Snapshot(99, 99)) == 30
    visibility.log(4, 40)
    assert visibility.offset_seen(Snapshot(99, 99)) == 40


def test_eviction_under_many_readers_never_reports_an_offset_too_high() -> None:
    visibility = Visibility(0)
    committed = 0
    lock = threading.Lock()
    wrong: list[tuple[int, int]] = []
    stopping = threading.Event()

    def read() -> None:
        while not stopping.is_set():
            with visibility.reading():
                with lock:
                    snapshot = Snapshot(committed + 1, committed + 1)
                    expected = committed
                if visibility.offset_seen(snapshot) > expected:
                    wrong.append((visibility.offset_seen(snapshot), expected))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for n in range(1, 5_000):
        visibility.log(n, n)  # logged first, seen later
        with lock:
            committed = n
    stopping.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert visibility.offset_seen(Snapshot(5_000, 5_000)) == 4_999


def test_resent_transaction_is_not_visible_before_a_new_snapshot_sees_it() -> None:
    visibility = Visibility(0)
    with visibility.reading():
        for n in range(1, 6):
            visibility.log(n, n * 10)
        visibility.notice(Snapshot(4, 6, frozenset({4})))
        assert visibility.visible == 30 and visibility.offset_seen(Snapshot(2, 2)) == 10
        visibility.cut(20)
        assert visibility.visible == 20
        visibility.log(3, 30)
        assert visibility.visible == 20 and visibility.exact(Snapshot(4, 4), 30) == 30
    visibility.notice(Snapshot(4, 4))
    assert visibility.visible == 30 and len(visibility) == 0


def test_read_across_a_restart_of_offsets_is_refused() -> None:
    visibility = Visibility(0)
    with pytest.raises(Unavailable), visibility.reading():
        visibility.start(12)
    with visibility.reading():
        assert visibility.offset_seen(Snapshot(2, 2)) == 12


def test_reused_transaction_ids_find_no_old_entries() -> None:
    visibility = Visibility(0)
    visibility.log(7, 1)
    visibility.notice(Snapshot(8, 8))
    late = Snapshot(2**31 + 100, 2**31 + 100)
    assert visibility.exact(late, 1) == 1
    visibility.log((2**31 + 200) % 2**32, 2)
    assert visibility.exact(late, 2) == 1
