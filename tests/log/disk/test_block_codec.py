"""The block codec returns exactly what was encoded, or reports that the bytes are damaged."""

from __future__ import annotations

import math
import zlib
from decimal import Decimal
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.log.samples import ITEMS, ORDERS, flat, in_parts, transaction, transactions
from tests.suite.examples import examples

from headwater.errors import LogDamaged
from headwater.log.disk.block_codec import COMPRESS_ABOVE, MAX_RAW, PLAIN, ZSTD, Block, _decoder, decode, encode
from headwater.log.transaction_parts import BLOCK_CHANGES, cut_into_blocks, joined
from headwater.model.change import Change, Op, Transaction
from headwater.model.literal import U64, UNAVAILABLE, Date, DateTime, Embedding, Json, Time
from headwater.model.table import Column, Table

NATIVE = [
    None,
    True,
    False,
    0,
    -(2**63),
    2**63 - 1,
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    "",
    "a\0b",
    "ü",
    b"",
    b"\xff\0",
]
TAGGED = [
    U64(2**64 - 1), Decimal("1.10"), Json('{"a": 1}'), Embedding((0.5, -1.0), "m"), Date("2024-02-29"),
    Time("12:00:00"), DateTime("2024-02-29T12:00:00Z"), UUID(int=5), UNAVAILABLE,
]  # fmt: skip
BROKEN = [b"\xff\xfe text".decode("utf-8", "surrogateescape")]
ANY = Table("any", (Column("v"),))


def back(block: Block) -> list[Transaction]:
    return decode(block.first, block.codec, block.crc, block.data, block.tables)


def round_trip(parts: list[Transaction]) -> list[Transaction]:
    return [part for block in encode(parts) for part in back(block)]


def typed(row: tuple[object, ...] | None) -> list[str]:
    return [] if row is None else [f"{type(value).__name__} {value!r}" for value in row]


@pytest.mark.parametrize("value", [*NATIVE, *TAGGED, *BROKEN], ids=repr)
def test_block_codec_keeps_every_value_and_its_type(value: object) -> None:
    sent = Change(Op.UPDATE, ANY, (value,), (value,))
    (found,) = round_trip([Transaction("t", (sent,), 1)])
    (change,) = found.changes
    assert typed(change.before) == typed(change.after) == typed((value,))
    assert type(change.before) is tuple and change.op is Op.UPDATE and change.table is ANY


def test_block_codec_keeps_nan() -> None:
    (found,) = round_trip([Transaction("t", (Change(Op.INSERT, ANY, None, (math.nan,)),), 1)])
    (value,) = found.changes[0].after or ()
    assert isinstance(value, float) and math.isnan(value)


def test_block_with_plain_and_tagged_values_is_decoded_unchanged() -> None:
    changes = tuple(Change(Op.INSERT, ANY, None, (value,)) for value in [*NATIVE, *TAGGED, *BROKEN, *NATIVE])
    (found,) = round_trip([Transaction("t", changes, 1)])
    assert [typed(change.after) for change in found.changes] == [typed(change.after) for change in changes]


values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(),
    st.binary(), st.sampled_from([*TAGGED, *BROKEN]),
)  # fmt: skip
rows = st.none() | st.lists(values, max_size=4).map(tuple)
changes = st.builds(
    Change,
    st.sampled_from(Op),
    st.sampled_from([ANY, ORDERS, ITEMS]),
    rows,
    rows,
    st.none() | st.text(max_size=5),
    st.booleans(),
)
groups = st.lists(
    st.tuples(st.lists(changes, min_size=1, max_size=5), st.integers(0, 2**20), st.integers(0, 2**55)),
    max_size=8,
)


@pytest.mark.slow
@settings(deadline=None)
@given(groups, st.integers(1, 2**50))
def test_random_transactions_survive_encode_and_decode(groups: list[tuple[list[Change], int, int]], first: int) -> None:
    parts, ts = [], 2**60
    for number, (made, step, us) in enumerate(groups):
        ts += step
        parts.append(
            Transaction(
                f"t{number}", tuple(made), first, ts, us // 1000, position=f"p{number}", commit_us_rest=us % 1000
            )
        )
        first += len(made)
    assert round_trip(parts) == parts


def test_only_large_blocks_are_compressed() -> None:
    (small,) = encode([transaction(1, 2)])
    (large,) = encode([transaction(1, 500)])
    assert (small.codec, small.raw) == (PLAIN, len(small.data))
    assert large.codec == ZSTD and len(large.data) < COMPRESS_ABOVE < large.raw


def test_block_of_the_format_without_microseconds_is_read() -> None:
    parts = [transaction(1, 2, ms=70), transaction(3, ms=71)]
    fields = msgspec.structs.astuple(_decoder.decode(next(encode(parts)).data))
    older = msgspec.msgpack.encode(fields[:-1])
    assert decode(1, PLAIN, zlib.crc32(older), older, (ORDERS,)) == parts


def test_block_header_describes_its_transactions() -> None:
    parts = [transaction(10, 2, ts=5, ms=70), transaction(12, 3, ts=6, ms=60)]
    (block,) = encode(parts)
    assert (block.first, block.count, block.upto, block.ts_first, block.ts_last) == (10, 5, 14, 5, 6)
    assert (block.commit_ms_last, block.position, block.id_first, block.id_last) == (70, "p14", "t10", "t12")
    assert (block.whole, block.ends, block.tables) == (10, True, (ORDERS,))


def test_block_inside_a_large_transaction_records_where_the_next_transaction_begins() -> None:
    blocks = list(encode([transaction(1, 1100), transaction(1101, 2)]))
    assert [(block.first, block.whole, block.ends) for block in blocks] == [
        (1, 1, False), (513, None, False), (1025, 1101, True),
    ]  # fmt: skip


def test_very_large_rows_are_split_into_smaller_blocks() -> None:
    text = "x" * (MAX_RAW // 3)
    whole = Transaction("t", tuple(Change(Op.INSERT, ANY, None, (text,)) for _ in range(10)), 1)
    blocks = list(encode([whole]))
    assert all(block.raw <= MAX_RAW for block in blocks) and len(blocks) == 6
    assert flat(part for block in blocks for part in back(block)) == flat([whole])


def test_row_larger_than_a_block_is_stored() -> None:
    huge = Transaction("t", (Change(Op.INSERT, ANY, None, ("x" * (MAX_RAW + 1),)),), 1)
    assert round_trip([huge]) == [huge]


@pytest.mark.parametrize("count", [2, 400])
def test_block_with_a_flipped_bit_is_refused(count: int) -> None:
    (block,) = encode([transaction(1, count)])
    damaged = bytearray(block.data)
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(LogDamaged, match="checksum"):
        decode(block.first, block.codec, block.crc, bytes(damaged), block.tables)


@pytest.mark.parametrize("codec", [PLAIN, ZSTD])
def test_block_with_undecodable_bytes_is_refused_with_its_offset(codec: int) -> None:
    (block,) = encode(transactions([1], first=9))
    with pytest.raises(LogDamaged, match="offset 9"):
        decode(9, codec, 0, b"", block.tables)


def test_parts_of_a_transaction_are_joined_inside_a_block() -> None:
    whole = transaction(1, 100)
    (block,) = encode(in_parts(whole, 30))
    assert back(block) == [whole]
    assert joined(in_parts(whole, 7)) == [whole]


def test_blocks_hold_whole_transactions_unless_a_transaction_exceeds_a_block() -> None:
    groups = list(cut_into_blocks(transactions([300, 300, 512, 1, 600, 5])))
    sizes = [[len(part.changes) for part in group] for group in groups]
    assert sizes == [[300], [300], [512], [1], [512], [88, 5]]


@given(st.lists(st.integers(1, 1200), max_size=12), st.integers(1, 700))
@examples(50)
def test_cutting_into_blocks_loses_no_change_and_joins_parts(sizes: list[int], part_size: int) -> None:
    sent = list(transactions(sizes))
    groups = list(cut_into_blocks(part for whole in sent for part in in_parts(whole, part_size)))
    assert flat(part for group in groups for part in group) == flat(sent)
    for group in groups:
        assert 0 < sum(len(part.changes) for part in group) <= BLOCK_CHANGES
        assert all(part.start == 0 for part in group[1:]) and all(part.last for part in group[:-1])


def test_parts_of_large_rows_are_cut_into_small_groups() -> None:
    table = Table("wide", (Column("id"), Column("text")), ("id",))
    changes = tuple(Change(Op.INSERT, table, after=(n, "x" * 1_000_000)) for n in range(100))
    parts = [
        Transaction("1", changes[low : low + 10], first=low + 1, ts=1, start=low, last=low == 90)
        for low in range(0, 100, 10)
    ]
    groups = list(cut_into_blocks(parts))
    sizes = [sum(len(part.changes) for part in group) for group in groups]
    assert sum(sizes) == 100
    assert max(sizes) <= 20, "never more than what was asked for and one part beyond"
    assert [group[0].first for group in groups] == [1 + sum(sizes[:place]) for place in range(len(sizes))]
