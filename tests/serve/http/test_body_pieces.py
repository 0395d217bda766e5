"""Answers encoded in pieces: the same bytes as in one go, within the limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.suite.deadlines import wait_until

from headwater.errors import AnswerTooLarge, Busy
from headwater.model.literal import Json, to_lit, to_plain
from headwater.model.work.answer_limits import MEMORY, AnswerRows, Reservation
from headwater.serve.rpc import body_pieces, query_body
from headwater.serve.rpc.body_pieces import Pieces, csv_pieces, data_pieces, encode_with
from headwater.sources.query import ReadResult

pytestmark = pytest.mark.slow

TEXTS = st.text(st.characters(codec="utf-8"), max_size=200) | st.sampled_from(["a\udc80b" * 30, '"' * 50, "\r\n", ""])
VALUES = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.booleans()
    | st.floats(allow_nan=False)
    | TEXTS
    | st.binary(max_size=200)
    | st.just(Json('{"a":[1,2,"' + "x" * 100 + '"]}'))
)


@st.composite
def reads(draw: st.DrawFn) -> ReadResult:
    width = draw(st.integers(1, 4))
    rows = draw(st.lists(st.tuples(*[VALUES] * width), max_size=12))
    return ReadResult(tuple(f'c"{place}' for place in range(width)), tuple(rows), 0, draw(st.booleans()))


SIZES = pytest.mark.parametrize("size", [8, 64, 1 << 20])


@pytest.fixture
def freed() -> None:
    """Wait until the answers of other tests take no memory."""
    wait_until(lambda: MEMORY.used == 0, "answers of other tests were freed")


@contextlib.contextmanager
def pieces_of(size: int) -> Iterator[None]:
    """Encode in pieces of `size` bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_pieces, "PIECE", size)
        patch.setattr(body_pieces, "_BASE64", max(size // 4 * 3, 3))
        yield


@given(read=reads())
@SIZES
@pytest.mark.parametrize("format", ["rows_json", "objects_json", "plain_json"])
def test_pieces_of_json_are_the_json(size: int, format: str, read: ReadResult) -> None:
    whole = msgspec.json.encode({"etag": "x", "data": query_body.data_of(read, format)})
    with pieces_of(size):
        made = encode_with({"etag": "x", "data": query_body.encode_data(read, format)})
    assert isinstance(made, Pieces)
    assert made.joined() == whole
    assert made.size == len(whole)


@given(read=reads())
@SIZES
def test_pieces_of_csv_do_not_depend_on_their_size(size: int, read: ReadResult) -> None:
    with pieces_of(size):
        made = csv_pieces(read).joined()
    assert csv_pieces(read).joined() == made


@SIZES
def test_pieces_of_arrow_hold_every_row(size: int) -> None:
    rows = tuple((place, "x" * place) for place in range(100))
    with pieces_of(size):
        body = query_body._arrow(ReadResult(("id", "v"), rows, 0))
    found = pa.ipc.open_stream(body.joined()).read_all().to_pydict()
    assert (found["id"], found["v"]) == ([row[0] for row in rows], [row[1] for row in rows])


def test_json_values_are_counted_by_their_text() -> None:
    rows = tuple((Json('"' + "x" * 1000 + '"'),) for _ in range(100))
    with pieces_of(4096):
        body = data_pieces(ReadResult(("a",), rows, 0), to_lit)
        large = data_pieces(ReadResult(("a",), ((Json("[" + "1," * 50_000 + "1]"),),), 0), to_lit)
    assert max(map(len, body)) < 10_000 and max(map(len, large)) < 10_000
    assert msgspec.json.decode(large.joined())["rows"][0][0]["v"] == [1] * 50_001


def test_answer_without_rows_has_its_columns_in_every_format() -> None:
    read = ReadResult(("a",), (), 0)
    assert msgspec.json.decode(data_pieces(read, to_lit).joined()) == {"columns": [{"name": "a"}], "rows": []}
    assert query_body._arrow(read).size > 0
    assert csv_pieces(read).joined() == b"a\r\n"


def test_encoded_form_past_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORY, "max_bytes", 1000)
    read = ReadResult(("a",), (("\x01" * 300,),), 0)  # each character becomes six
    with pytest.raises(AnswerTooLarge):
        data_pieces(read, to_plain)
    with pytest.raises(AnswerTooLarge):
        csv_pieces(ReadResult(("a",), (("é" * 600,),), 0))


@pytest.mark.usefixtures("freed")
def test_body_without_free_memory_is_refused_and_keeps_none() -> None:
    MEMORY.reserve(MEMORY.max_memory - (2 << 20))
    try:
        with pytest.raises(Busy):
            data_pieces(ReadResult(("a",), (("x" * (4 << 20),),), 0), to_lit)
        assert MEMORY.used == MEMORY.max_memory - (2 << 20)
    finally:
        MEMORY.release(MEMORY.max_memory - (2 << 20))


@pytest.mark.usefixtures("freed")
def test_body_holds_its_memory_until_it_is_gone() -> None:
    body = data_pieces(ReadResult(("a",), (("x" * (4 << 20),),), 0), to_lit)
    assert MEMORY.used >= 4 << 20
    del body
    assert MEMORY.used == 0


@pytest.mark.usefixtures("freed")
def test_rows_hold_their_memory_until_they_are_gone() -> None:
    reservation = Reservation()
    reservation.add(5 << 20, 1, 0)
    rows = AnswerRows.of([("x",)], reservation)
    del reservation
    assert rows == (("x",),)
    assert MEMORY.used >= 5 << 20
    del rows
    assert MEMORY.used == 0


def test_each_piece_of_a_body_is_sent_as_its_own_asgi_message() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    body = Pieces()
    body.add(b"a")
    body.add(b"bc")
    asyncio.run(body_pieces.send_body(send, body))
    assert [(each["body"], each.get("more_body", False)) for each in sent] == [
        (b"a", True),
        (b"bc", True),
        (b"", False),
    ]


def test_value_of_a_type_without_json_is_refused() -> None:
    with pytest.raises(TypeError):
        encode_with({"a": object()})


def test_equal_names_of_columns_get_numbers() -> None:
    assert query_body._unique(("a", "a", "a_2", "b", "a")) == ["a", "a_2", "a_2_2", "b", "a_3"]
    assert len({*query_body._unique(("a",) * 30_000)}) == 30_000  # at once: each is looked up, not searched for
