"""The file of ranges: epochs against a model, ids that are never reused, leases, and foreign files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import LogDamaged, Unavailable
from headwater.model.keys.key import Span
from headwater.model.keys.range import Range
from headwater.ranges.ranges.split import Merge, Split, applied, spans_of
from headwater.ranges.ranges.store import OtherLeases, Pull, RangeBasis, Store

CUT = RangeBasis("g", 1, 100, 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store.open(tmp_path / "ranges.db")
    yield made
    made.close()


def begin(store: Store, *bounds: bytes, table: str = "t", cut: RangeBasis = CUT, db: str = "main") -> list[Range]:
    store.begin(db, table, cut, lambda new_id: [Range(new_id(), 1, span, 5, 50) for span in spans_of(bounds)])
    return store.ranges(db, table)


def step(store: Store, *steps: Split | Merge) -> list[Range]:
    held = store.ranges("main", "t")
    assert store.change("main", "t", CUT, held, lambda new_id: applied(held, steps, new_id))
    return store.ranges("main", "t")


def test_split_and_merge_keep_the_id_of_the_left_range_and_raise_the_epoch() -> None:
    """As the design says: both raise the epoch."""
    ids = iter([7, 8])
    one = Range(3, 4, Span(b"a", b"z"))
    left, right, last = applied([one], [Split(0, (b"m", b"p"))], lambda: next(ids))
    assert (left.id, left.epoch, left.span) == (3, 5, Span(b"a", b"m"))
    assert (right.id, right.epoch, right.span) == (7, 5, Span(b"m", b"p"))
    assert (last.id, last.epoch, last.span) == (8, 5, Span(b"p", b"z"))
    again = Range(7, 9, Span(b"m", b"p"))
    (whole,) = applied([left, again, last], [Merge(0, 2)], lambda: 0)
    assert (whole.id, whole.epoch, whole.span) == (3, 10, Span(b"a", b"z"))


def test_split_range_has_its_parts_and_merged_range_its_union_as_heirs(store: Store) -> None:
    first, second = begin(store, b"m")
    left, right, other = step(store, Split(0, (b"c",)))
    assert store.heirs("main", "t", first.id, 1) == [left, right]
    assert (right.id, other) == (second.id + 1, second)
    whole, _ = step(store, Merge(0, 1))
    assert store.heirs("main", "t", first.id, 1) == store.heirs("main", "t", right.id, 2) == [whole]
    assert store.heirs("main", "t", whole.id, 99) == [whole]  # an epoch that never was
    assert store.heirs("main", "t", second.id, 99) == [second]
    assert (
        store.heirs("main", "t", 99, 1) is store.heirs("main", "t", 0, 1) is store.heirs("main", "other", 1, 1) is None
    )


def test_change_of_outdated_ranges_has_no_effect(store: Store) -> None:
    held = begin(store, b"m")
    step(store, Merge(0, 1))
    assert not store.change("main", "t", CUT, held, lambda new_id: pytest.fail("never asked"))


def test_later_first_request_keeps_the_split_of_the_earlier(store: Store) -> None:
    first = begin(store, b"m")
    assert begin(store, b"a", b"b") == first


def test_new_split_has_new_ids_and_old_ids_lead_to_all_ranges(store: Store) -> None:
    old = begin(store, b"m")
    new = begin(store, b"a", b"b", cut=RangeBasis("g", 2, 100, 0))
    assert not {one.id for one in old} & {one.id for one in new}
    assert store.heirs("main", "t", old[0].id, 1) == new
    newest = begin(store, cut=RangeBasis("other", 1, 100, 0))
    assert store.heirs("main", "t", old[0].id, 1) == store.heirs("main", "t", new[2].id, 1) == newest


def test_ids_are_not_given_out_again_after_a_drop_or_a_restart(tmp_path: Path) -> None:
    given: list[int] = []
    for _ in range(3):
        store = Store.open(tmp_path / "ranges.db")
        given += [one.id for db in ("main", "b") for one in begin(store, b"m", db=db)]
        for db in ("main", "b"):
            store.drop_database(db)
        assert store.ranges("main", "t") == [] and store.cut("main", "t") is None
        store.close()
    assert len(set(given)) == len(given) == 12


def test_ranges_and_leases_survive_a_restart(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "ranges.db")
    begin(store, b"m")
    held = step(store, Split(1, (b"x",)))
    store.close()
    store = Store.open(tmp_path / "ranges.db")
    assert store.ranges("main", "t") == held and store.cut("main", "t") == CUT
    store.close()


Steps = st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.binary(min_size=1, max_size=2)), max_size=12)


@given(Steps)
def test_random_splits_and_merges_lead_every_old_range_to_the_ranges_that_overlap_it(
    steps: list[tuple[bool, int, bytes]],
) -> None:
    store = Store.open(":memory:")
    begin(store, b"m")
    seen = {(one.id, one.epoch): one.span for one in store.ranges("main", "t")}  # the model: every pair ever given
    for is_split, number, at in steps:
        held = store.ranges("main", "t")
        number %= len(held)
        if is_split and at > held[number].span.start and (held[number].span.end is None or at < held[number].span.end):
            live = step(store, Split(number, (at,)))
        elif not is_split and number + 1 < len(held):
            live = step(store, Merge(number, number + 1))
        else:
            continue
        assert [one.span for one in live] == spans_of([one.span.start for one in live[1:]])
        for one in live:
            assert seen.setdefault((one.id, one.epoch), one.span) == one.span, "an epoch has two spans"
        for (id, epoch), span in seen.items():
            heirs = store.heirs("main", "t", id, epoch)
            assert heirs == [one for one in live if one.span.overlaps(span)]
            is_live = any((one.id, one.epoch) == (id, epoch) for one in live)
            assert not is_live or [(one.id, one.epoch) for one in heirs or []] == [(id, epoch)]
    store.close()


# --- leases ------------------------------------------------------------------------------------------------------


def pull(
    subscriber: str = "s", table: str = "t", range: int = 0, kept: int = 5, until: int = 100, owner: str = ""
) -> Pull:
    return Pull("main", subscriber, table, range, "g", kept, until, owner)


def test_lease_replaces_that_of_its_name_and_expired_ones_are_deleted(store: Store) -> None:
    store.put_lease(pull(kept=5), now_ms=1)
    store.put_lease(pull(kept=9), now_ms=1)
    assert store.leases("main") == [pull(kept=9)] and store.leases("b") == []
    store.put_lease(pull("other", until=900), now_ms=100)
    assert store.leases("main") == [pull("other", until=900)]


def test_dropping_leases_removes_only_those_of_the_subscriber_on_that_table(store: Store) -> None:
    mine = [pull(range=0), pull(range=7)]
    others = [pull("z"), pull(table="u")]
    for one in (*mine, *others):
        store.put_lease(one, now_ms=0)
    assert sorted(store.drop_leases("main", "t", "s"), key=lambda one: one.range) == mine
    assert store.drop_leases("main", "t", "s") == []
    assert {one.name for one in store.leases("main")} == {one.name for one in others}
    assert len({one.name for one in (*mine, *others)}) == 4


def test_leases_next_to_a_new_one_are_counted_without_the_replaced_and_the_ended(store: Store) -> None:
    for each in (pull(owner="ann"), pull(range=7, owner="bob"), pull("z", owner="ann"), pull("y", until=5)):
        store.put_lease(each, now_ms=0)
    assert store.others(pull(owner="ann"), now_ms=5) == OtherLeases(2, 1, frozenset({"ann", "bob"}))
    assert store.others(pull("y", owner="ann"), now_ms=5) == OtherLeases(3, 2, frozenset())


def test_drop_with_an_owner_leaves_the_leases_of_others(store: Store) -> None:
    mine, nobodys, theirs = pull(range=1, owner="ann"), pull(range=2), pull(range=3, owner="bob")
    for each in (mine, nobodys, theirs):
        store.put_lease(each, now_ms=0)
    assert sorted(store.drop_leases("main", "t", "s", "ann"), key=lambda each: each.range) == [mine, nobodys]
    assert store.leases("main") == [theirs]
    assert store.drop_leases("main", "t", "s") == [theirs]


# --- files -------------------------------------------------------------------------------------------------------


def test_opening_a_foreign_or_damaged_ranges_file_fails_and_leaves_it_unchanged(tmp_path: Path) -> None:
    other = apsw.Connection(str(tmp_path / "ranges.db"))
    other.execute("CREATE TABLE t(a)")
    other.close()
    before = (tmp_path / "ranges.db").read_bytes()
    with pytest.raises(LogDamaged, match="does not hold ranges"):
        Store.open(tmp_path / "ranges.db")
    (tmp_path / "text").write_text("nothing of SQLite" * 100)
    with pytest.raises(LogDamaged, match="damaged"):
        Store.open(tmp_path / "text")
    assert (tmp_path / "ranges.db").read_bytes() == before
    with pytest.raises(Unavailable, match="opened"):
        Store.open(tmp_path / "missing" / "ranges.db")


def test_lease_in_a_file_of_the_first_format_has_no_owner(tmp_path: Path) -> None:
    Store.open(tmp_path / "ranges.db").close()
    file = apsw.Connection(str(tmp_path / "ranges.db"))
    file.execute("ALTER TABLE lease DROP COLUMN owner")
    file.execute("INSERT INTO lease VALUES ('main', 's', 't', 0, 'g', 5, 100)")
    file.pragma("user_version", 1)
    file.close()
    for _ in range(2):
        store = Store.open(tmp_path / "ranges.db")
        assert store.leases("main") == [pull(owner="")]
        store.close()


def test_opening_a_ranges_file_of_a_newer_format_raises_log_damaged(tmp_path: Path) -> None:
    Store.open(tmp_path / "ranges.db").close()
    file = apsw.Connection(str(tmp_path / "ranges.db"))
    file.pragma("user_version", 99)
    file.close()
    with pytest.raises(LogDamaged, match="format 99"):
        Store.open(tmp_path / "ranges.db")
