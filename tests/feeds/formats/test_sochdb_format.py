"""The hand-written encoder of SochDB's events writes the same bytes as the protobuf library."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.model.model_values import VALUES
from tests.suite.examples import examples

from headwater.errors import HeadwaterError
from headwater.feeds.formats.images import Image, image_columns
from headwater.feeds.formats.registry import MAKERS, OWN, encoder
from headwater.feeds.formats.sochdb import EVENT, WATCH, varint
from headwater.feeds.formats.values import PLAIN
from headwater.feeds.options import Shape
from headwater.model.change import Change, Op, Transaction
from headwater.model.formats import CHANGE_FORMATS as FORMATS
from headwater.model.keys.key import encode_key
from headwater.model.kv_table import SHAPE
from headwater.model.literal import UNAVAILABLE
from headwater.model.table import Column, Row, Table
from headwater.serve.grpc.messages import message

NUMBERS = {Op.INSERT: 1, Op.UPDATE: 2, Op.DELETE: 3, Op.SCHEMA_CHANGE: 4, Op.TRUNCATE: 3}
PLAIN_TABLE = Table("t", tuple(map(Column, ("b", "a", "ü"))), ("b",))
KEYED = Table("ta\udcffble", tuple(map(Column, ("b", "a", "c"))), ("b", "c"))
KEYLESS = Table("loose", tuple(map(Column, ("b", "a", "c"))), ())
SHAPES = {name: Shape("main", name, True, True) for name in (EVENT, WATCH)}
PAIRS = st.tuples(st.binary(max_size=300), st.binary(max_size=300), st.none() | st.integers(0, 2**50))


def key_of(table: Table, row: Row | None) -> bytes:
    if row is None:
        return b""
    if table == SHAPE:
        return bytes(row[0])  # type: ignore[arg-type]
    try:
        return encode_key(table.key_of(row))
    except HeadwaterError:
        return b""


def image_of(table: Table, row: Row | None, unknown: set[str]) -> bytes:
    if row is None:
        return b""
    if table == SHAPE:
        return bytes(row[1])  # type: ignore[arg-type]
    return Image(table, image_columns(table, SHAPES[EVENT]), PLAIN)(row, unknown)


def defined(part: Transaction, offset: int, change: Change, op: Op) -> dict[str, bytes]:
    """Return both messages, built field by field by the protobuf library."""
    table, unknown = change.table, set[str]()
    before = None if op is Op.INSERT else change.before
    after = None if op is Op.DELETE else change.after
    row = before if after is None else after
    common: dict[str, Any] = {"sequence": offset, "timestamp_us": part.commit_ts_us, "operation": NUMBERS[op]}
    common["after_value"] = image_of(table, after, unknown)
    common["before_value"] = image_of(table, before, unknown)
    common["unavailable"] = sorted(unknown)
    key, old = key_of(table, row), key_of(table, before)
    more: dict[str, Any] = {"key": key, "table": table.name.encode("utf-8", "backslashreplace").decode()}
    more["txn_id"] = int(part.id) if part.id.isdecimal() else part.first - part.start
    if before is not None and after is not None and old != key:
        more["before_key"] = old
    if row is None:
        more["ddl"] = change.ddl if op is Op.SCHEMA_CHANGE else f"TRUNCATE TABLE {more['table']}"
    more["resnapshot"] = change.resnapshot
    made = {EVENT: message("sochdb.v1.SubscribeEvent")(**common, **more)}
    made[WATCH] = message("sochdb.v1.WatchKeyEvent")(**common)
    return {name: one.SerializeToString(deterministic=True) for name, one in made.items()}


@st.composite
def written(draw: st.DrawFn) -> tuple[Transaction, int, Change, Op]:
    table = draw(st.sampled_from([PLAIN_TABLE, KEYED, KEYLESS, SHAPE]))
    rows = PAIRS if table == SHAPE else st.tuples(VALUES, VALUES, VALUES)
    old, new = draw(rows), draw(rows)
    op = draw(st.sampled_from(list(Op)))
    if op in (Op.SCHEMA_CHANGE, Op.TRUNCATE):
        ddl = draw(st.text(max_size=200)) if op is Op.SCHEMA_CHANGE else None
        change = Change(op, table, ddl=ddl, resnapshot=op is Op.SCHEMA_CHANGE and draw(st.booleans()))
    else:
        change = Change(Op.UPDATE, table, old, draw(st.sampled_from([old, new])))
    first = draw(st.integers(1, 2**62))
    id = draw(
        st.sampled_from(["x:1", "7", str(2**63)]) | st.integers(1, 2**64 - 1).map(str).filter(lambda t: len(t) < 20)
    )
    part = Transaction(
        id,
        (change,),
        first,
        0,
        draw(st.integers(0, 2**43)),
        draw(st.integers(0, min(first, 300) - 1)),
        commit_us_rest=draw(st.integers(0, 999)),
    )
    return part, first, change, op


@pytest.mark.slow
@examples(500)
@given(written())
def test_bytes_equal_those_of_the_protobuf_library(case: tuple[Transaction, int, Change, Op]) -> None:
    wanted = defined(*case)
    for name, shape in SHAPES.items():
        assert encoder(shape).change(*case) == wanted[name], name


@pytest.mark.parametrize("name", [*MAKERS, *OWN, *SHAPES])
def test_encoded_part_is_not_kept_by_the_encoder(name: str) -> None:
    """An encoder is cached for each selection of columns, and a part has all rows of a transaction."""
    part = Transaction("1", (Change(Op.INSERT, PLAIN_TABLE, None, (1, 2, 3)),), 1, 1 << 16)
    cached, references = encoder(Shape("main", name, True, True)), sys.getrefcount(part)
    assert cached.change(part, 1, part.changes[0], Op.INSERT)
    assert sys.getrefcount(part) == references


@pytest.mark.parametrize("name", list(SHAPES))
def test_snapshot_row_is_an_insert(name: str) -> None:
    row = (1, UNAVAILABLE, 3)
    kind = "SubscribeEvent" if name == EVENT else "WatchKeyEvent"
    found = message(f"sochdb.v1.{kind}").FromString(encoder(SHAPES[name]).row(PLAIN_TABLE, row, 9, 5))
    assert (found.sequence, found.operation, found.timestamp_us, found.unavailable) == (9, 1, 5000, ["a"])
    assert found.after_value == '{"b":1,"ü":3}'.encode()


@pytest.mark.parametrize(("number", "wanted"), [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\x01"), (2**64 - 1, None)])
def test_varint_has_seven_bits_per_byte(number: int, wanted: bytes | None) -> None:
    assert varint(number) == (wanted or b"\xff" * 9 + b"\x01")


def test_formats_cannot_be_selected_by_name() -> None:
    assert not {EVENT, WATCH} & ({*FORMATS} | MAKERS.keys())
