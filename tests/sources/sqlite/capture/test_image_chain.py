"""Order of captured changes by their images: in one page, over several pages, and for keys that were moved."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import apsw
import pytest
from tests.sources.sqlite_source import Rig, schema_changes

from headwater.model.change import Change, Op
from headwater.model.table import Column, Row, Table
from headwater.sources.sqlite.capture.capture_table import Follower
from headwater.sources.sqlite.capture.image_chain import ImageChain
from headwater.sources.sqlite.capture.trigger_installation import may_nest

TABLE = Table("t", (Column("k"), Column("v")), ("k",))


def change(before: Row | None, after: Row | None) -> Change:
    op = Op.INSERT if before is None else Op.DELETE if after is None else Op.UPDATE
    return Change(op, TABLE, before, after)


def pages(*pages: list[tuple[Any, Any]]) -> tuple[list[tuple[Any, Any]], set[str]]:
    """Return the images in their new order, and the tables whose order is unknown."""
    chain, ordered, lost = ImageChain(), list[tuple[Any, Any]](), set[str]()
    offset = 0
    for page in pages:
        found, without = chain.page([(offset + n, change(*images)) for n, images in enumerate(page, 1)])
        assert [number for number, _ in found] == list(range(offset + 1, offset + len(page) + 1))
        offset += len(page)
        ordered += [(each.before, each.after) for _, each in found]
        lost |= without
    return ordered, lost


OUTER, INNER = ((1, "a"), (2, "a")), ((2, "a"), (2, "b"))  # an UPDATE that moves a key, and what it caused
PLAIN = (None, (7, "x"))


def test_inner_update_of_a_moved_row_follows_the_outer_one() -> None:
    assert pages([PLAIN, INNER, OUTER]) == ([PLAIN, OUTER, INNER], set())


def test_updates_of_a_moved_row_in_the_right_order_keep_their_order() -> None:
    assert pages([OUTER, PLAIN, INNER]) == ([OUTER, PLAIN, INNER], set())
    assert pages([((2, "z"), None), OUTER, INNER]) == ([((2, "z"), None), OUTER, INNER], set())


@pytest.mark.parametrize(
    ("first", "second"),
    [([INNER], [OUTER]), ([PLAIN, ((1, "b"), (1, "c"))], [((1, "a"), (1, "b"))]), ([(None, (1, "a"))], [INNER, OUTER])],
    ids=["moved", "in place", "repaired"],
)
def test_changes_in_two_pages_are_put_in_order_or_reported(first: Any, second: Any) -> None:
    ordered, lost = pages(first, second)
    is_repaired = second == [INNER, OUTER]
    assert lost == (set() if is_repaired else {"t"})
    assert ordered == first + ([OUTER, INNER] if is_repaired else second)


def test_pages_of_different_keys_and_of_chained_images_keep_their_order() -> None:
    first = [(None, (n, 0)) for n in range(50)]
    second = [((n, 0), (n, 1)) for n in range(50)]
    third = [((n, 1), (n + 100, 1)) for n in range(50)] + [(None, (n, 2)) for n in range(50)]
    assert pages(first, second, third) == (first + second + third, set())


def test_row_like_one_that_moved_away_asks_for_a_snapshot() -> None:
    captured = [((1, "x"), None), INNER, OUTER, (None, (1, "a"))]
    assert pages(captured) == (captured, {"t"})


@pytest.mark.parametrize(("one", "other"), [(-1, -2), ("a", b"a"), (1, 1 + (1 << 61) - 1)])
def test_keys_with_equal_hashes_in_two_pages_are_different_keys(one: Any, other: Any) -> None:
    first, second = [(None, (one, "x"))], [(None, (other, "y")), ((other, "y"), (other, "z"))]
    assert pages(first, second) == (first + second, set())


def test_row_that_is_written_many_times_is_put_in_order() -> None:
    steps = [((1, n), (1, n + 1)) for n in range(2_000)]
    shuffled = steps.copy()
    random.Random(7).shuffle(shuffled)
    assert pages(shuffled) == (steps, set())


def test_nested_changes_of_a_moved_row_are_put_in_order() -> None:
    path = [(1, "a"), (2, "a"), (2, "b"), (3, "b"), (3, "c")]
    steps = list(itertools.pairwise(path))
    for first in range(len(steps)):
        assert pages(steps[:first] + steps[first:][::-1]) == (steps, set())


# --- with SQLite ------------------------------------------------------------------------------------------------

CASCADE = "ON UPDATE CASCADE"
SELF_REFERENCES = {
    "key": (f"CREATE TABLE n(id INTEGER PRIMARY KEY, p INTEGER REFERENCES n(id) {CASCADE})", "(1, 1)", "id = 2"),
    "text key": (f"CREATE TABLE n(id TEXT PRIMARY KEY, p REFERENCES n(id) {CASCADE})", "('x', 'x')", "id = 'y'"),
    "set null": ("CREATE TABLE n(id INTEGER PRIMARY KEY, p REFERENCES n(id) ON UPDATE SET NULL)", "(1, 1)", "id = 7"),
    "unique": (
        f"CREATE TABLE n(id INTEGER PRIMARY KEY, k UNIQUE, p REFERENCES n(k) {CASCADE})",
        "(1, 5, 5)",
        "k = 6",
    ),
}
SERIES = "WITH s(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < {}) INSERT INTO n SELECT {} FROM s"


@pytest.mark.parametrize("kind", SELF_REFERENCES)
def test_action_of_a_foreign_key_on_the_same_row_is_logged_after_its_cause(rig: Callable[..., Rig], kind: str) -> None:
    table, values, assigned = SELF_REFERENCES[kind]
    r = rig(table, f"INSERT INTO n VALUES {values}")
    r.foreign.run(f"UPDATE n SET {assigned}")
    changes = r.check()
    assert len(changes) == 2 and not schema_changes(changes)
    assert r.write(f"UPDATE n SET {assigned.replace('=', '= 1 ||')}") == [""]
    r.check()


def test_action_of_a_foreign_key_in_another_page_than_its_cause_asks_for_a_snapshot(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Follower._read, "__defaults__", (64,))  # rows of a page
    r = rig(SELF_REFERENCES["unique"][0], SERIES.format(100, "i, i, i"))
    r.foreign.script("BEGIN", "INSERT INTO n VALUES (1000, 1000, NULL)", "UPDATE n SET k = k + 5000", "COMMIT")
    found = list[Change]()
    while parts := list(r.source.follow(after=r.after)):
        r.after = parts[-1].upto
        found += [each for part in parts for each in part.changes]
    assert [each.resnapshot for each in schema_changes(found)] == [True]


def test_page_that_is_not_followed_is_not_compared_with_the_next() -> None:
    chain = ImageChain()
    _, lost = chain.page([(1, change(*INNER))], is_followed=False)
    ordered, also_lost = chain.page([(2, change(*OUTER))], is_followed=False)
    assert (lost, also_lost) == (set(), set()) and ordered == [(2, change(*OUTER))]


@pytest.mark.parametrize(
    ("statement", "nests"),
    [
        ("CREATE INDEX plain ON t(v)", False),
        ("CREATE TRIGGER theirs AFTER INSERT ON t BEGIN DELETE FROM t WHERE k = 0; END", True),
        ("CREATE TABLE child(k INTEGER PRIMARY KEY, t INTEGER REFERENCES t(k) ON DELETE CASCADE)", True),
        ("CREATE TABLE child(k INTEGER PRIMARY KEY, t INTEGER REFERENCES t(k))", False),
    ],
)
def test_statements_may_nest_with_triggers_and_actions_of_foreign_keys(statement: str, nests: bool) -> None:
    db = apsw.Connection(":memory:")
    db.execute("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
    db.execute(statement)
    assert may_nest(db) == nests
