"""Arrow bodies: complete ones give their batches, and bodies cut anywhere are detected."""

import io
from collections.abc import Callable
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.client.faulty_server import arrow_body

from headwater.client.arrow_stream import BatchParser, ReceivedBatch, read_batches
from headwater.errors import Unavailable

SCHEMA = pa.schema(
    [("id", pa.int64()), ("name", pa.string()), ("v", pa.list_(pa.float32()))], metadata={"version": "3"}
)
SIZES = (3, 0, 1, 50)


def batch(size: int) -> pa.RecordBatch:
    rows = [{"id": n, "name": None if n % 3 else "x" * n, "v": [float(n)]} for n in range(size)]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


BODY = arrow_body(SCHEMA, [(batch(size), {"upto": str(size)}) for size in SIZES])


def read_sync(body: bytes) -> list[ReceivedBatch]:
    return list(read_batches(io.BytesIO(body).read))


def read_fed(body: bytes, cuts: tuple[int, ...] = ()) -> list[ReceivedBatch]:
    fed, found = BatchParser(), []
    for low, high in pairwise([0, *sorted(cuts), len(body)]):
        found += fed.take(body[low:high])
    if not fed.ended:
        raise Unavailable("not whole")
    return found


Read = Callable[[bytes], list[ReceivedBatch]]


@pytest.mark.parametrize("read", [read_sync, read_fed])
def test_complete_arrow_body_returns_its_schema_batches_and_metadata(read: Read) -> None:
    first, *rest = read(BODY)
    assert first.batch.num_rows == 0 and first.batch.schema == SCHEMA and first.metadata == {}
    assert [told.batch for told in rest] == [batch(size) for size in SIZES]
    assert [told.metadata[b"upto"] for told in rest] == [str(size).encode() for size in SIZES]
    assert first.schema == rest[-1].schema == {b"version": b"3"}


@pytest.mark.slow
@pytest.mark.parametrize("read", [read_sync, read_fed])
def test_arrow_body_cut_anywhere_is_refused(read: Read) -> None:
    for cut in range(len(BODY)):
        with pytest.raises(Unavailable):
            read(BODY[:cut])


@pytest.mark.parametrize("read", [read_sync, read_fed])
@pytest.mark.parametrize(
    "body", [b"<html>" * 40, b'{"code": "internal"}', bytes(64), b"\xff" * 64], ids=["html", "json", "zeros", "ones"]
)
def test_body_that_is_not_arrow_is_refused(read: Read, body: bytes) -> None:
    with pytest.raises(Unavailable):
        read(body)


@given(st.lists(st.integers(0, len(BODY)), max_size=12))
def test_body_fed_in_arbitrary_pieces_is_parsed_completely(cuts: list[int]) -> None:
    assert [told.batch for told in read_fed(BODY, tuple(cuts))] == [told.batch for told in read_sync(BODY)]


def test_arrow_batches_are_returned_as_soon_as_they_are_complete() -> None:
    fed, seen = BatchParser(), []
    for place in range(len(BODY)):
        seen.append(sum(told.batch.num_rows for told in fed.take(BODY[place : place + 1])))
        assert not fed.ended or place == len(BODY) - 1
    assert [rows for rows in seen if rows] == [3, 1, 50]
