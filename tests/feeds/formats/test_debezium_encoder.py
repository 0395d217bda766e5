"""The compiled Debezium encoder writes the same bytes as the Python encoder, for one change and for many."""

import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.model.model_values import VALUES
from tests.suite.examples import examples

from headwater.feeds.formats.debezium import Debezium
from headwater.feeds.formats.debezium_encoder import IS_BUILT, Compiled, debezium
from headwater.feeds.formats.frame import TemplateFrame
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Row, Table
from headwater.serve.http import transport_frames

pytestmark = pytest.mark.skipif(not IS_BUILT, reason="there was no C compiler at the installation")

KINDS = ("i64", "str", "f64", "bool", "any", "dec")
NAMES = ("id", "a%db", "ü", "100%", "b", "%b")
WIDE = Table("t%d", tuple(map(Column, NAMES, KINDS)), ("id",))
BY_TEXT = Table("t", WIDE.columns, ("a%db",))
PAIRED = Table("t", WIDE.columns, ("id", "b"))
QUOTED = Table('q"', (Column('a"', "i64"), *WIDE.columns[1:]), ('a"',))
PLAIN = (
    st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9) | st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1]),
    st.text(max_size=5) | st.just("\udc80") | st.just('"\\\n\u2028'),
    st.floats(),
    st.booleans(),
    st.none() | st.text(max_size=3),
    st.none(),
)
VALUE = [st.one_of(plain, plain, plain, st.none(), VALUES) for plain in PLAIN]
BARE = Table("bare", WIDE.columns, ())
HIDDEN = Table("h", (Column("_rowid_", "i64", hidden=True), *WIDE.columns[1:]), ("_rowid_",))
TABLES = [WIDE, BY_TEXT, PAIRED, QUOTED, BARE, HIDDEN]
ROW = st.tuples(*VALUE)
EDGES = [0.0, 1e-3, 1e-4, 1e11, 1e11 - 0.5, 99999999999.9999, 0.30000000000000004, 1e15, 1e16, 5e-324, math.inf]
ALIKE = Shape("main", "debezium_json", True, True)


def changes_of(table: Table, old: Row, new: Row) -> tuple[Change, ...]:
    return (
        Change(Op.INSERT, table, None, new),
        Change(Op.UPDATE, table, old, new),
        Change(Op.UPDATE, table, None, new),
        Change(Op.SCHEMA_CHANGE, table, ddl="ALTER TABLE t ADD x", resnapshot=True),
        Change(Op.DELETE, table, old, None),
        Change(Op.TRUNCATE, table),
        Change(Op.UPDATE, table, new, new),
    )


@pytest.mark.slow
@examples(800)
@given(
    ROW,
    ROW,
    st.booleans(),
    st.sampled_from(TABLES),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from([(), ("id",), ("b", "ü", "gone")]),
    st.sampled_from([transport_frames.sse, transport_frames.ndjson]),
    st.lists(st.sampled_from([None, Op.INSERT, Op.UPDATE, Op.DELETE]), min_size=7, max_size=7),
)
def test_compiled_and_python_encoders_write_the_same_bytes(
    old: Row,
    new: Row,
    is_kept: bool,
    table: Table,
    images: tuple[bool, bool],
    columns: tuple[str, ...],
    frame: TemplateFrame,
    said: list[Op | None],
) -> None:
    new = tuple(old[at] if is_kept and at in table.key_places else value for at, value in enumerate(new))
    shape = Shape("m%n", "debezium_json", *images, columns)
    changes = changes_of(table, old, new)
    # An update may be delivered as any op; other changes are delivered as their own op, or not at all.
    ops = [op and (op if each.op is Op.UPDATE else each.op) for op, each in zip(said, changes, strict=True)]
    parts = [Transaction('x"%d', changes, 7, 5 << 16, 9, 3), Transaction("4611686018427387904", changes, 14, 6 << 16)]
    python, compiled = Debezium(shape), Compiled(shape)
    many, expected = compiled.frames(frame.enclosing, 2**30, 2**30), b""
    for part in (*parts, parts[0]):
        for offset, (change, op) in enumerate(zip(changes, ops, strict=True), part.first):
            if op is not None:
                data = python.change(part, offset, change, op)
                assert compiled.change(part, offset, change, op) == data
                expected += frame(offset, op.word, data)
        assert many.take(part, ops) == len(ops)
    assert many.data() == expected
    assert many.count == 3 * sum(op is not None for op in ops)


def one(value: Any, kind: str = "any") -> tuple[bytes, bytes]:
    """Return the bytes that the Python and the compiled encoder write for an update of a row with only `value`."""
    table = Table("t", (Column("v", kind),), ("v",))
    change = Change(Op.UPDATE, table, (value,), (value,))
    part = Transaction("1", (change,), 1, 1 << 16)
    return Debezium(ALIKE).change(part, 1, change, Op.UPDATE), Compiled(ALIKE).change(part, 1, change, Op.UPDATE)


@pytest.mark.slow
@examples(800)
@given(
    st.floats()
    | st.builds(lambda whole, places: whole / 10**places, st.integers(-(10**16), 10**16), st.integers(0, 8))
    | st.builds(lambda at, up: math.nextafter(at, up), st.integers(-(10**12), 10**12), st.sampled_from([-9e99, 9e99]))
)
def test_random_floats_are_written_alike_by_both_encoders(value: float) -> None:
    python, compiled = one(value, "f64")
    assert compiled == python


@pytest.mark.parametrize("value", EDGES)
def test_extreme_floats_are_written_alike_by_both_encoders(value: float) -> None:
    for sign in (1, -1):
        python, compiled = one(sign * value)
        assert compiled == python


@pytest.mark.slow
def test_every_character_is_written_alike_by_both_encoders() -> None:
    for char in [*map(chr, range(0x100)), "\u2028", "\U0001f600", "\udc80"]:
        for place in range(17):
            python, compiled = one("a" * place + char + "ä" * (17 - place), "str")
            assert compiled == python, (char, place)


def test_full_page_takes_no_more_changes() -> None:
    row: Row = (1, "a", 0.5, True, "b", None)
    changes = tuple(Change(Op.INSERT, WIDE, None, row) for _ in range(5))
    part = Transaction("1", changes, 11, 1 << 16)
    ops: list[Op | None] = [None, Op.INSERT, Op.INSERT, None, Op.INSERT]
    few = Compiled(ALIKE).frames(transport_frames.sse.enclosing, 2, 2**30)
    assert not few.is_full
    assert (few.take(part, ops), few.count, few.last, few.is_full) == (3, 2, 13, True)
    small = Compiled(ALIKE).frames(transport_frames.sse.enclosing, 100, 1)
    assert (small.take(part, ops), small.count, small.last, small.is_full) == (2, 1, 12, True)
    assert small.take(part, [None] * 5) == 5


def test_encoded_part_is_not_kept_by_the_encoder() -> None:
    part = Transaction("1", (Change(Op.INSERT, WIDE, None, (1, "a", 0.5, True, "b", None)),), 1, 1 << 16)
    encoder, references = Compiled(ALIKE), sys.getrefcount(part)
    page = encoder.frames(transport_frames.sse.enclosing, 2, 2**30)
    assert page.take(part, [Op.INSERT]) == 1 == page.count
    assert encoder.change(part, 1, part.changes[0], Op.INSERT) in page.data()
    assert sys.getrefcount(part) == references


def test_row_with_too_few_values_is_rejected() -> None:
    part = Transaction("1", (Change(Op.INSERT, WIDE, None, (1,)),), 1)
    with pytest.raises(IndexError):
        Compiled(ALIKE).change(part, 1, part.changes[0], Op.INSERT)


def test_compiled_encoder_is_used_where_built() -> None:
    assert isinstance(debezium(ALIKE), Compiled)
