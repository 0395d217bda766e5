"""The decoder of messages and rows without a server: every message, cut, damaged, and against the Python decoder."""

import functools
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.servers import missing
from tests.sources.postgres.capture import pg_messages as pg

from headwater.errors import SourceError
from headwater.model.change import Change, Op
from headwater.model.literal import UNAVAILABLE, Json
from headwater.model.table import Column, Table
from headwater.sources.postgres.capture.decode import row_decoder
from headwater.sources.postgres.capture.decode.pgoutput import (
    UNCHANGED,
    Begin,
    Binary,
    Decoded,
    Delete,
    Insert,
    Message,
    Relation,
    RelationColumn,
    StreamAbort,
    StreamCommit,
    StreamStart,
    Truncate,
    Type,
    Update,
    decode,
    decode_begin,
    decode_commit,
)
from headwater.sources.postgres.capture.decode.replication_frames import (
    BadMessage,
    decode_keepalive,
    lsn_of,
    lsn_text,
    status_update,
    unix_us,
)
from headwater.sources.postgres.capture.decode.row_decoder import RowDecoders
from headwater.sources.postgres.capture.decode.row_plan import HEAD, DiagnosticDecoder
from headwater.sources.postgres.types import converter

OLD, NEW = pg.tupled(b"O", [b"1", None]), pg.tupled(b"N", [b"1", "u"])
SAID: list[tuple[bytes, Decoded]] = [
    (
        pg.relation({"id": 23, "naïve": 25}),
        Relation(
            pg.OID, "public", "t", "d", (RelationColumn("id", 23, -1, True), RelationColumn("naïve", 25, -1, False))
        ),
    ),
    (b"R" + struct.pack(">I", 1) + b"\0t\0n\0\0", Relation(1, "pg_catalog", "t", "n", ())),
    (b"Y" + struct.pack(">I", 50_000) + b"s\0mood\0", Type(50_000, "s", "mood")),
    (pg.insert(b"1", None, "u"), Insert(pg.OID, (b"1", None, UNCHANGED))),
    (pg.row(b"I", b"N\0\1b\0\0\0\1x"), Insert(pg.OID, (Binary(b"x"),))),
    (pg.row(b"U", NEW), Update(pg.OID, "", None, (b"1", UNCHANGED))),
    (pg.row(b"U", OLD, NEW), Update(pg.OID, "O", (b"1", None), (b"1", UNCHANGED))),
    (pg.row(b"D", pg.tupled(b"K", [b"1"])), Delete(pg.OID, "K", (b"1",))),
    (b"T" + struct.pack(">IBII", 2, 3, 5, 6), Truncate((5, 6))),
    (pg.message("p", b"\0\1"), Message(True, 77, "p", b"\0\1")),
    (pg.stream_start(7), StreamStart(7, True)),
    (pg.stream_commit(7, 100), StreamCommit(7, 0, 100, 110, 0)),
    (pg.stream_abort(7, 8), StreamAbort(7, 8)),
    (pg.stream_abort(7, 8, more=True), StreamAbort(7, 8)),
]


@pytest.mark.parametrize(("message", "meaning"), SAID, ids=lambda each: type(each).__name__)
def test_every_message_is_decoded_as_the_protocol_defines(message: bytes, meaning: Decoded) -> None:
    assert decode(message) == meaning


@pytest.mark.parametrize("message", [message for message, _ in SAID])
def test_truncated_or_too_long_message_is_refused(message: bytes) -> None:
    for end in range(len(message)):
        if message[:1] == b"A" and end == 9:
            continue  # what version 2 sends
        with pytest.raises(BadMessage):
            decode(message[:end])
    with pytest.raises(BadMessage):
        decode(message + b"\0")


@pytest.mark.parametrize("kind", [b"R", b"Y", b"I", b"U", b"D", b"T", b"M"])
def test_messages_inside_a_stream_block_carry_their_transaction_id(kind: bytes) -> None:
    for message, meaning in SAID:
        if message[:1] == kind:
            assert decode(kind + struct.pack(">I", 99) + message[1:], in_stream=True) == meaning


@pytest.mark.parametrize(
    ("read", "message", "meaning"),
    [(decode_begin, pg.begin(7, 100), Begin(100, 0, 7)), (decode_commit, pg.commit(100), 110)],
)
def test_begin_and_commit_are_decoded_as_the_protocol_defines(
    read: Callable[[bytes], object], message: bytes, meaning: object
) -> None:
    assert read(message) == meaning
    for odd in (message[:-1], message + b"x", message[:1], b""):
        with pytest.raises(BadMessage):
            read(odd)


@given(st.binary(max_size=60), st.booleans())
def test_random_bytes_are_decoded_or_refused_as_a_bad_message(data: bytes, in_stream: bool) -> None:
    try:
        decode(data, in_stream=in_stream)
    except BadMessage as error:
        assert isinstance(error, ValueError) and isinstance(error, SourceError)


# --- rows ------------------------------------------------------------------------------------------------

TYPES = {"id": 23, "b": 16, "f": 701, "t": 25, "n": 1700, "j": 3802, "d": 1184, "x": 17}
KINDS = ("i64", "bool", "f64", "str", "dec", "json", "datetime", "bytes")
TABLE = Table("t", tuple(Column(n, k) for n, k in zip(TYPES, KINDS, strict=True)), ("id",))
CONVERTS = [converter(oid, {}) for oid in TYPES.values()]
KEYS = [place == 0 for place in range(len(KINDS))]
CAREFUL = DiagnosticDecoder(TABLE, KEYS, CONVERTS)
both = pytest.mark.parametrize(
    "twin",
    [
        pytest.param(row_decoder.PYTHON, id="python"),
        pytest.param(
            row_decoder.COMPILED,
            id="compiled",
            marks=pytest.mark.skipif(not row_decoder.COMPILED, reason="not compiled"),
        ),
    ],
)


def test_row_decoder_is_compiled() -> None:
    if row_decoder.COMPILED is None:
        missing("the compiled decoder was not built: make setup, with a C compiler")


@functools.cache
def decoders(twin: row_decoder.Twin, careful: bool = True) -> RowDecoders:
    found = RowDecoders(pg.OID, TABLE, KEYS, CONVERTS, twin)
    if not careful:
        found._careful = None  # type: ignore[assignment]  # would be called in vain
    return found


def fast(twin: row_decoder.Twin, message: bytes, careful: bool = True) -> Change:
    found = decoders(twin, careful).of(message[:HEAD])
    if found is None:
        raise BadMessage("nobody reads this")
    return found(message)


def cell(text: st.SearchStrategy[str]) -> st.SearchStrategy[pg.Cell]:
    return st.one_of(st.none(), st.just("u"), text.map(str.encode))


VALUES = (
    st.integers(-(2**31), 2**31 - 1).map(str),
    st.sampled_from(["t", "f"]),
    st.floats().map(lambda v: {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(v), repr(v))),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=300),
    st.decimals(allow_nan=False, allow_infinity=False, places=4).map(str),
    st.sampled_from(["{}", "1e400", "[1, 2]"]),
    st.datetimes().map(lambda v: f"{v:%Y-%m-%d %H:%M:%S}+00".rjust(22, "0")),
    st.binary(max_size=40).map(lambda v: "\\x" + v.hex()),
)
ROW = st.tuples(*map(cell, VALUES))
MESSAGE = st.one_of(
    ROW.map(lambda new: pg.row(b"I", pg.tupled(b"N", new))),
    ROW.map(lambda new: pg.row(b"U", pg.tupled(b"N", new))),
    st.tuples(ROW, ROW).map(lambda both: pg.row(b"U", pg.tupled(b"O", both[0]), pg.tupled(b"N", both[1]))),
    st.tuples(ROW, ROW).map(lambda both: pg.row(b"U", pg.tupled(b"K", both[0]), pg.tupled(b"N", both[1]))),
    ROW.map(lambda old: pg.row(b"D", pg.tupled(b"O", old))),
    ROW.map(lambda old: pg.row(b"D", pg.tupled(b"K", old))),
)


@both
@given(MESSAGE)
def test_fast_decoders_return_the_same_change_as_the_careful_decoder(twin: row_decoder.Twin, message: bytes) -> None:
    assert repr(fast(twin, message, careful=False)) == repr(CAREFUL(message))


@both
@given(st.lists(st.tuples(MESSAGE, st.booleans()), max_size=12), st.integers(1, 8), st.integers(1, 2000))
def test_run_of_rows_ends_at_an_unknown_frame_or_at_its_limit(
    twin: row_decoder.Twin, sent: list[tuple[bytes, bool]], most: int, most_bytes: int
) -> None:
    made = decoders(twin)
    for message, is_known in sent:
        if is_known:
            made.of(message[:HEAD])
    known = {message[:HEAD]: made.made[message[:HEAD]] for message, is_known in sent if is_known}
    frames = [b"w" + bytes(24) + message for message, _ in sent]
    coming = iter([(len(frame), memoryview(frame)) for frame in frames])
    changes: list[Change] = []
    size, frame, taken = twin.take(lambda _: next(coming, (0, memoryview(b""))), known, changes, most, most_bytes)

    wanted: list[bytes] = []
    for message, _ in sent:
        if message[:HEAD] not in known or len(wanted) >= most or sum(map(len, wanted)) >= most_bytes:
            break
        wanted.append(message)
    assert repr(changes) == repr([CAREFUL(message) for message in wanted])
    assert taken == sum(map(len, wanted))
    stopped_at = frames[len(wanted)] if len(wanted) < len(frames) else b""
    assert (size, bytes(frame)) == (len(stopped_at), stopped_at)


@both
@pytest.mark.parametrize("frame", [b"k" + bytes(17), b"k" + bytes(40), b"w" + bytes(24) + b"E", b"w", b"\0" * 50])
def test_batch_decoder_stops_at_a_frame_without_a_row(twin: row_decoder.Twin, frame: bytes) -> None:
    changes: list[Change] = []
    assert twin.take(lambda _: (len(frame), memoryview(frame)), {}, changes, 9, 9) == (len(frame), frame, 0)
    assert twin.take(lambda _: (-1, memoryview(b"")), {}, changes, 9, 9) == (-1, b"", 0)
    assert changes == []


@both
def test_unreadable_row_inside_a_run_is_refused(twin: row_decoder.Twin) -> None:
    message = pg.insert(b"1")
    head = message[:HEAD]
    found = decoders(twin).of(head)
    assert found is not None
    frame = b"w" + bytes(24) + message
    with pytest.raises(BadMessage, match="has 1 values"):
        twin.take(lambda _: (len(frame), memoryview(frame)), {head: found}, [], 9, 999)


@both
@pytest.mark.parametrize("text", ["0", "-0", "-1", "9" * 18, "-" + "9" * 18, str(2**63 - 1), str(-(2**63)), "9" * 30])
def test_integers_of_any_length_are_decoded_exactly(twin: row_decoder.Twin, text: str) -> None:
    assert fast(twin, pg.insert(text.encode(), *[None] * 7), careful=False).after == (int(text), *[None] * 7)


@both
@pytest.mark.parametrize(
    "text", [b"", b"-", b"--1", b"1-", b"1\x002", b"\xc2\xb2", b"t", b"0x1p3", b"1_0", b" 1", b"9" * 99]
)
def test_unusual_numbers_are_decoded_alike_by_both_decoders(twin: row_decoder.Twin, text: bytes) -> None:
    message = pg.insert(text, text, text, *[None] * 5)
    assert repr(fast(twin, message)) == repr(CAREFUL(message))


@both
@given(MESSAGE, st.data())
def test_truncated_row_is_refused(twin: row_decoder.Twin, message: bytes, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(BadMessage):
        fast(twin, message[:end])
    with pytest.raises(BadMessage):
        fast(twin, message + b"n")


@both
@given(MESSAGE, st.data())
def test_row_with_a_wrong_byte_is_refused_or_decoded_alike_by_both_decoders(
    twin: row_decoder.Twin, message: bytes, data: st.DataObject
) -> None:
    place = data.draw(st.integers(5, len(message) - 1))
    broken = message[:place] + bytes([data.draw(st.integers(0, 255))]) + message[place + 1 :]
    try:
        found = repr(fast(twin, broken))
    except BadMessage:
        return
    assert found == repr(CAREFUL(broken))


@both
def test_value_that_cannot_be_converted_keeps_its_text(twin: row_decoder.Twin) -> None:
    odd = (b"no number", b"maybe", b"1.5.5", b"\xff\xfe", b"x", b"{", b"yesterday", b"\\xzz")
    change = fast(twin, pg.insert(*odd))
    assert change.after == tuple(value.decode("utf-8", "surrogateescape") for value in odd)
    assert fast(twin, pg.insert(*odd[:5], b"{}", None, "u")).after == (*change.after[:5], Json("{}"), None, UNAVAILABLE)


@both
def test_binary_values_are_refused(twin: row_decoder.Twin) -> None:
    with pytest.raises(BadMessage, match="binary"):
        fast(twin, pg.row(b"I", b"N\0\x08" + b"b\0\0\0\1x" + b"n" * 7))


@both
def test_row_with_wrong_number_of_values_is_refused(twin: row_decoder.Twin) -> None:
    with pytest.raises(BadMessage, match="has 1 values"):
        fast(twin, pg.insert(b"1"))


@both
def test_row_of_table_without_columns_is_decoded(twin: row_decoder.Twin) -> None:
    message = pg.insert()
    found = RowDecoders(pg.OID, Table("t", ()), [], [], twin).of(message[:HEAD])
    assert found is not None
    assert found(message) == Change(Op.INSERT, Table("t", ()), None, ())


# --- frames ----------------------------------------------------------------------------------------------


def test_keepalive_frames_are_decoded() -> None:
    assert decode_keepalive(b"k" + struct.pack(">QqB", 2, 3, 1)) == (2, True)


@given(st.binary(max_size=24))
def test_unknown_frames_are_refused(data: bytes) -> None:
    if not (data[:1] == b"k" and len(data) == 18):
        with pytest.raises(BadMessage):
            decode_keepalive(data)


def test_status_update_has_the_form_of_the_protocol() -> None:
    written = status_update(3, now_ms=946_684_800_001, reply=True)
    assert struct.unpack(">cQQQqB", written) == (b"r", 3, 3, 3, 1000, 1)
    assert unix_us(1_500_000) == 946_684_801_500_000
    assert unix_us(-1) == 946_684_799_999_999


@given(st.integers(0, 2**64 - 1))
def test_positions_are_written_and_read(lsn: int) -> None:
    assert lsn_of(lsn_text(lsn)) == lsn


@pytest.mark.parametrize("text", ["", "1", "1/", "/1", "1/2/3", "g/1", "123456789/1", " 1/2"])
def test_malformed_position_is_refused(text: str) -> None:
    with pytest.raises(BadMessage):
        lsn_of(text)
