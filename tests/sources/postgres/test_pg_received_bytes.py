"""Answers over TCP are refused at their limit, not when all of their bytes were received."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import psycopg
import pytest
from tests.sources.postgres.pg_server import Server
from tests.sources.postgres.pg_source import shared_server

from headwater.errors import AnswerTooLarge, InvalidRequest
from headwater.model.work.answer_limits import MEMORY
from headwater.sources.postgres.protocol_session import SPARE, Link
from headwater.sources.postgres.received_bytes import ReceivedBytes

pytestmark = pytest.mark.slow

MIB = 1 << 20
BUFFERS = 24 * MIB  # of both sockets, and what PostgreSQL sends until it is cancelled


class CountingProxy:
    """A TCP port in front of a server on a UNIX socket; counts the bytes that the server sent."""

    def __init__(self, server: Server) -> None:
        self._to = str(server.folder / ".s.PGSQL.5432")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._to)
            self._open += [client, server]
            for ends in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._copy, args=ends)
                self._threads.append(thread)
                thread.start()

    def _copy(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
                self.sent += len(piece) if is_counted else 0
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def proxy() -> Iterator[CountingProxy]:
    made = CountingProxy(shared_server())
    yield made
    made.close()


@pytest.fixture
def link(proxy: CountingProxy) -> Iterator[Link]:
    link = Link(lambda: psycopg.connect(f"host=127.0.0.1 port={proxy.port} dbname=postgres user=postgres"))
    yield link
    link.close()


@pytest.mark.parametrize(
    "sql", ["SELECT repeat('x', 400000000)", "SELECT CAST(repeat('x', 400000000) AS int)"], ids=["value", "error"]
)
def test_large_answer_is_refused_near_its_limit(link: Link, proxy: CountingProxy, sql: str) -> None:
    with pytest.raises((AnswerTooLarge, InvalidRequest)):
        link.run(sql, max_rows=10)
    assert proxy.sent < MEMORY.max_bytes + SPARE + BUFFERS
    assert MEMORY.used == 0


def test_answer_below_the_limit_is_received(link: Link) -> None:
    answer = link.run("SELECT repeat('x', 40000000)", max_rows=10)
    assert len(answer.rows[0][0] or b"") == 40_000_000
    assert answer.reservation is not None
    answer.reservation.release()


def test_bytes_of_a_tcp_socket_are_counted_exactly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender, receiver = socket.create_connection(listener.getsockname()), listener.accept()[0]
        with sender, receiver:
            counter, counted = ReceivedBytes(receiver.fileno()), 0
            for size in (1, 5_000, 300_000):
                thread = threading.Thread(target=sender.sendall, args=(b"x" * size,))
                thread.start()
                left = size
                while left:
                    counter.before_read()
                    read = len(receiver.recv(1 << 12))
                    left, counted = left - read, counted + counter.after_read()
                thread.join()
                assert counted == size, "bytes that come during a read are counted by the next"
                counted = 0
