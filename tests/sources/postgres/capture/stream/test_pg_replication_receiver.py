"""Frames from a real connection: the same with and without a receiving thread."""

import contextlib
import select
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import pq
from psycopg.pq.abc import PGconn
from tests.pipeline.servers import missing
from tests.sources.postgres.pg_server import PATIENCE, Stream

from headwater.errors import SourceError
from headwater.sources.postgres.capture.decode import row_decoder
from headwater.sources.postgres.capture.decode.replication_frames import DATA, DATA_HEAD, status_update
from headwater.sources.postgres.capture.stream.replication_receiver import (
    DirectReceiver,
    FrameReceiver,
    ThreadReceiver,
    _made,
)

Start = Callable[..., Stream]
Open = Callable[[Stream], FrameReceiver]
END = b"the end"


def received(connection: PGconn) -> FrameReceiver:
    return ThreadReceiver(connection, "test")


both = pytest.mark.parametrize(
    "make",
    [
        pytest.param(DirectReceiver, id="plain"),
        pytest.param(received, id="received", marks=pytest.mark.skipif(not _made(), reason="not compiled")),
    ],
)


@pytest.fixture
def opened(make: Callable[[PGconn], FrameReceiver]) -> Iterator[Open]:
    made: list[FrameReceiver] = []

    def start(one: Stream) -> FrameReceiver:
        made.append(make(one._wire))
        return made[-1]

    yield start
    for each in made:
        each.close()


def wait(wire: FrameReceiver) -> None:
    poll = select.poll()
    poll.register(wire.socket, select.POLLIN)
    assert poll.poll(PATIENCE * 1000)
    wire.read()


def messages(wire: FrameReceiver) -> Iterator[bytes]:
    """Yield the messages up to the mark that the test writes."""
    while True:
        size, frame = wire.get(1)
        if not size:
            assert not wire.is_ended()
            wait(wire)
        elif frame[0] == DATA:
            assert size == len(frame)
            yield bytes(frame[DATA_HEAD:])
            if END in bytes(frame):
                return


def mark(one: Stream) -> None:
    one.run(f"SELECT pg_logical_emit_message(false, 'test', '{END.decode()}')")


def test_compiled_module_is_built() -> None:
    if row_decoder.COMPILED is None or _made() is None:
        missing("the compiled receiver was not built: make setup, with a C compiler")


@both
def test_frames_of_all_sizes_are_received_whole_and_in_order(stream: Start, opened: Open) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY, a text)", streaming="off")
    wire = opened(one)
    sizes = [0, 1, 7, 100, 20_000, 9_000_000, 3_000_000, 3_000_000, *range(2_000)]
    one.run(*(f"INSERT INTO t SELECT {n}, repeat('x', {size})" for n, size in enumerate(sizes[:8])))
    one.run(f"INSERT INTO t SELECT n, repeat('x', n - 8) FROM generate_series(8, {len(sizes) - 1}) n")
    mark(one)
    found = [message for message in messages(wire) if message[:1] == b"I"]
    head = 1 + 4 + 1 + 2  # kind, table, which row, how many values
    texts = [message[head:].split(b"t", 2) for message in found]
    assert [int(text[1][4:]) for text in texts] == list(range(len(sizes)))
    assert [len(text[2]) - 4 for text in texts] == sizes


@both
def test_status_updates_are_sent_while_the_server_sends(stream: Start, opened: Open) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY)", streaming="off")
    wire = opened(one)
    one.run("INSERT INTO t SELECT generate_series(1, 20000)")
    mark(one)
    count = 0
    for _ in messages(wire):
        count += 1
        if count % 500 == 0:
            wire.send(status_update(1, now_ms=0))
    assert count > 20_000


@both
def test_terminated_connection_is_reported_after_all_received_rows(stream: Start, opened: Open) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY)")
    wire = opened(one)
    one.run("INSERT INTO t SELECT generate_series(1, 100)")
    mark(one)
    assert len([message for message in messages(wire) if message[:1] == b"I"]) == 100
    one.run(f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{one.name}'")
    with contextlib.suppress(psycopg.Error, SourceError):
        while (size := wire.get(1)[0]) >= 0 and not wire.is_ended():
            if not size:
                wait(wire)
    wire.close()
    result = one._wire.get_result()
    assert result is None or result.status == pq.ExecStatus.FATAL_ERROR


@both
def test_connection_with_unread_rows_is_closed_without_hanging(stream: Start, opened: Open) -> None:
    one = stream("CREATE TABLE t (id int PRIMARY KEY, a text)", streaming="off")
    wire = opened(one)
    one.run("INSERT INTO t SELECT n, repeat('x', 1000) FROM generate_series(1, 20000) n")
    while not wire.get(1)[0]:
        wait(wire)
    began = time.monotonic()
    wire.close()
    one._wire.finish()
    assert time.monotonic() - began < PATIENCE  # it does not hang
