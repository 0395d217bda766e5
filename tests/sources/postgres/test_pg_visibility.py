"""What a snapshot sees of the log, in all orders of commit and visibility, and around the end of the numbers."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.sources.postgres.visibility import KEEP, Snapshot, Visibility


def test_a_snapshot_is_read_from_its_text() -> None:
    assert Snapshot.of("10:20:10,14") == Snapshot(10, 20, frozenset({10, 14}))
    assert Snapshot.of("10:10:") == Snapshot(10, 10)


def test_numbers_are_compared_around_their_end() -> None:
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
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_offset_is_before_the_first_that_is_not_seen(
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


def test_what_everybody_sees_is_forgotten_and_what_a_reader_may_not_see_is_not() -> None:
    visibility = Visibility(0)
    for n in range(1, 201):
        visibility.log(n, n)
    with visibility.reading():
        old = Snapshot(50, 201, frozenset({50}))
        with visibility.reading():
            assert visibility.offset_seen(Snapshot(201, 201)) == 200
        visibility.notice(Snapshot(201, 201))
        assert len(visibility) == 200  # a reader that began before is still here
        assert visibility.offset_seen(old) == 49
        assert not visibility.is_prefix(old)
    visibility.notice(Snapshot(201, 201))
    assert len(visibility) <= KEEP
    assert visibility.offset_seen(Snapshot(201, 201)) == 200


def test_what_comes_again_is_not_there_twice() -> None:
    visibility = Visibility(0)
    for n in range(1, 6):
        visibility.log(n, n * 10)
    visibility.cut(30)
    assert visibility.offset_seen(Snapshot(99, 99)) == 30
    visibility.log(4, 40)
    assert visibility.offset_seen(Snapshot(99, 99)) == 40


def test_forgetting_under_many_readers_never_claims_too_much() -> None:
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
