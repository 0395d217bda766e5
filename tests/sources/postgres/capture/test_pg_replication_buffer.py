"""Buffered transactions: whole, repeatable, bounded, and requested again if released too early."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from headwater.errors import InvalidRequest, SourceError
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Table
from headwater.sources.postgres.capture import replication_buffer as module
from headwater.sources.postgres.capture.replication_buffer import ReplicationBuffer, TransactionEnd
from headwater.sources.postgres.capture.slot.server_history import brought_up
from headwater.sources.postgres.query.statement_rules import placed
from headwater.sources.postgres.schema.shape_changes import Shapes

T = Table("t", (Column("k", "i64"),), ("k",))
START = TransactionEnd(10, 1000, Shapes())


def part(xid: int, count: int, *, lsn: str = "0/0", start: int = 0, last: bool = True) -> Transaction:
    changes = tuple(Change(Op.INSERT, T, None, (n,)) for n in range(count))
    return Transaction(str(xid), changes, start=start, last=last, position=lsn)


def followed(held: ReplicationBuffer, after: int) -> Iterator[Transaction]:
    """Follow as if every transaction were visible."""
    return held.follow(after, held.latest, held.large)


def test_transaction_is_not_delivered_before_it_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHANGES", 5)
    held = ReplicationBuffer(START)
    held.put(part(1, 2, lsn="0/500"), 10, None)
    held.put(part(2, 3, lsn="0/600"), 10, None)
    assert [list(held.follow(10, visible, held.large)) for visible in (10, 11)] == [[], []]
    assert [each.id for each in held.follow(10, 12, held.large)] == ["1"]
    assert [each.id for each in held.follow(10, 15, held.large)] == ["1", "2"]
    held.acknowledge(15)
    held.put(part(3, 5, last=False), 10, None)
    assert held.large == "3"
    assert list(held.follow(15, 15, "")) == [] and next(held.follow(15, 15, "3")).id == "3"


def test_offsets_continue_after_the_log_and_incomplete_transactions_are_held() -> None:
    held = ReplicationBuffer(START)
    held.put(part(1, 2, lsn="0/500"), 10, None)
    held.put(part(2, 3, last=False), 10, None)
    assert [each.first for each in followed(held, 10)] == [11]
    held.put(part(2, 1, start=3, lsn="0/600"), 10, None)
    assert [(each.first, each.upto) for each in followed(held, 10)] == [(11, 12), (13, 15), (16, 16)]
    assert [(each.first, each.upto) for each in followed(held, 13)] == [(14, 15), (16, 16)]
    assert held.acknowledge(14).position == 0x500
    assert held.acknowledge(16).position == 0x600
    assert (held.changes, held.durable, held.latest) == (0, 16, 16)


def test_new_session_drops_the_incomplete_transaction() -> None:
    held = ReplicationBuffer(START)
    held.put(part(1, 2, lsn="0/500"), 10, None)
    held.put(part(2, 3, last=False), 10, None)
    assert held.rewind().offset == 12 and held.latest == 12 and held.changes == 2
    held.put(part(2, 4, lsn="0/600"), 10, None)
    assert [each.upto for each in followed(held, 10)] == [12, 16]


def test_large_transaction_is_released_as_it_is_read_and_is_resent_if_not_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_CHANGES", 4)
    held = ReplicationBuffer(START)
    held.put(part(1, 1, lsn="0/500"), 1, None)
    held.put(part(2, 3, last=False), 1, None)
    assert [each.upto for each in followed(held, 10)] == [11]
    assert not held.has_room and list(followed(held, 11)) == []  # what is before it is not durable yet
    held.acknowledge(11)
    held.put(part(2, 3, start=3, last=False), 1, None)
    parts = followed(held, 11)
    assert [each.first for each in itertools.islice(parts, 2)] == [12, 15]
    held.put(part(2, 1, start=6, lsn="0/900"), 1, None)
    assert [each.first for each in parts] == [18]
    assert list(followed(held, 11)) == [] and held.wants_back  # it could not be logged
    assert held.rewind().offset == 11 and not held.wants_back
    held.put(part(2, 7, lsn="0/900"), 1, None)
    assert [each.first for each in followed(held, 11)] == [12]
    assert held.acknowledge(18).position == 0x900


def test_large_transaction_read_in_part_is_resent_after_the_stream_was_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_CHANGES", 4)
    held = ReplicationBuffer(START)
    held.put(part(1, 5, last=False), 1, None)
    assert next(followed(held, 10)).first == 11  # and no more of it is taken
    held.put(part(1, 1, start=5, lsn="0/900"), 1, None)
    assert held.rewind().offset == 16  # cut off before anybody asked again
    assert list(followed(held, 10)) == [] and held.wants_back
    assert held.rewind().offset == 10
    held.put(part(1, 6, lsn="0/900"), 1, None)
    assert [(each.first, each.upto) for each in followed(held, 10)] == [(11, 16)]


def test_reader_of_a_large_transaction_receives_an_error_when_it_is_rewound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHANGES", 2)
    held = ReplicationBuffer(START)
    held.put(part(2, 3, last=False), 1, None)
    parts = followed(held, 10)
    next(parts)
    held.rewind()
    with pytest.raises(SourceError):
        next(parts)


def test_stored_transaction_end_is_updated_by_later_log_entries() -> None:
    wider = Table("t", (*T.columns, Column("v")), ("k",), 2)
    shapes = Shapes({"t": T, "u": T}, {"t": 1, "u": 2}, {"t": 1, "u": 1})
    log = [
        Transaction("1", (Change(Op.SCHEMA_CHANGE, wider, ddl=""),), first=11, position="0/7"),
        Transaction("2", (Change(Op.SCHEMA_CHANGE, Table("u", T.columns), ddl="DROP TABLE u"),), 12, position="0/9"),
    ]
    point = brought_up(TransactionEnd(10, 1, shapes), log)
    assert (point.offset, point.position) == (12, 9)
    assert point.shapes == Shapes({"t": wider}, {"t": 1}, {"t": 2, "u": 1})


def ddl_transaction(xid: int, *changes: tuple[Table, str]) -> Transaction:
    """Return a transaction of schema changes: pairs of a table and its statement."""
    made = tuple(Change(Op.SCHEMA_CHANGE, table, ddl=ddl) for table, ddl in changes)
    return Transaction(str(xid), made, first=10 + xid, position=f"0/{xid}")


def test_owners_of_table_names_are_updated_by_later_log_entries() -> None:
    shapes, x = Shapes({"t": T}, {"t": 1}, {"t": 1}, secret="s"), Table("x", T.columns, T.key)
    owners = {"t": 7, "x": 8, "y": 9}

    def found(*parts: Transaction) -> tuple[dict[str, int], tuple[int, ...]]:
        point = brought_up(TransactionEnd(10, 1, shapes), parts, owners)
        assert point.shapes.secret == "s"
        return dict(point.shapes.oids), point.shapes.displaced

    assert found() == ({"t": 1}, ())
    assert found(ddl_transaction(1, (x, ""))) == ({"t": 1, "x": 8}, ())
    assert found(ddl_transaction(1, (T, "ALTER TABLE t RENAME TO x"), (x, ""))) == ({"x": 1}, ())
    assert found(ddl_transaction(1, (T, "DROP TABLE t"), (T, ""))) == ({}, (1,))
    assert found(ddl_transaction(1, (x, "")), ddl_transaction(2, (x, "DROP TABLE x"), (x, ""))) == ({"t": 1}, ())


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT :a, :b, :a", "SELECT $1, $2, $1"),
        ("SELECT ':a', \":a\", :a::text -- :a\n/* :a */", "SELECT ':a', \":a\", $1::text -- :a\n/* :a */"),
        ("SELECT $x$ :a $x$, $$:b$$, :b", "SELECT $x$ :a $x$, $$:b$$, $1"),
    ],
)
def test_named_parameters_become_positional_outside_of_quotes_and_comments(sql: str, expected: str) -> None:
    assert placed(sql, {"a": 1, "b": 2})[0] == expected


def test_missing_query_argument_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        placed("SELECT :c", {"a": 1})
    with pytest.raises(InvalidRequest):
        placed("SELECT $2", {"$2": 1})
    assert placed("SELECT $1, $2", {"$2": 1, "1": 2}) == ("SELECT $1, $2", [2, 1])
