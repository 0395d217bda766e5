"""Connections that send bytes cheap to send and costly to parse: blank lines, tiny chunks, unread bodies."""

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.serve.server.test_pipelined_requests import GET, LAST, connected, protocol_of, rest, statuses
from tests.serve.server_fixture import Client, NoDatabases, serving
from tests.suite.deadlines import wait_until
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headwater.config import Secret
from headwater.serve.server.http_protocol import MAX_BLANK, MAX_FRAMING, MAX_UNREAD, TURN_STEPS

PING = b'{"id": 1, "method": "system.ping"}'
POST = b"POST /api/v1/rpc HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@pytest.fixture
def client() -> Iterator[Client]:
    with serving(NoDatabases()) as client:
        yield client


@pytest.fixture
def guarded() -> Iterator[Client]:
    with serving(NoDatabases(), token=Secret("s3cret-token")) as client:
        yield client


def chunks(data: bytes, size: int) -> bytes:
    parts = [data[place : place + size] for place in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def sent(open: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the server may close before the end
        open.sendall(data)


# --- blank lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"\r\n", b"\n"])
@pytest.mark.parametrize("before", [b"", GET % b"/healthz"])
def test_many_blank_lines_close_the_connection(client: Client, line: bytes, before: bytes) -> None:
    with connected(client) as open:
        open.sendall(before)
        answers = b""
        while before and not answers.endswith(b"}"):
            answers += open.recv(65536)
        sent(open, line * 20_000)
        answers += rest(open)
    assert statuses(answers) == ([200] if before else []) + [400]


def test_blank_lines_in_small_parts_are_counted_together(client: Client) -> None:
    with connected(client) as open:
        open.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(MAX_BLANK):
            sent(open, b"\r\n")
        assert statuses(rest(open)) == [400]


def test_few_blank_lines_before_each_request_are_ignored(client: Client) -> None:
    blank = b"\r\n" * (MAX_BLANK // 2)
    with connected(client) as open:
        open.sendall((blank + GET % b"/healthz") * 50 + blank + LAST)
        assert statuses(rest(open)) == [200] * 51


# --- turns -----------------------------------------------------------------------------------------------


def test_bytes_with_many_parser_steps_are_parsed_in_several_loop_turns(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[int] = Counter()  # of the parser, by turn of the event loop
    turn = 0
    inherited = HttpToolsProtocol.data_received

    def counting(self: HttpToolsProtocol, data: bytes) -> None:
        calls[turn] += 1
        inherited(self, data)

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if not stopped:
            client.loop.call_soon(count_turns)

    stopped = False
    monkeypatch.setattr(HttpToolsProtocol, "data_received", counting)
    blank = b"\r\n" * (128 << 10)
    with connected(client) as open:
        open.sendall(CHUNKED)
        protocol = protocol_of(client, open)
        wait_until(lambda: protocol.cycle is not None, "the body is awaited")
        client.loop.call_soon_threadsafe(count_turns)
        data = chunks(PING, 1_000) + chunks(blank, len(blank)) + END + LAST
        client.loop.call_soon_threadsafe(protocol.data_received, data)  # at once, as the event loop may do
        answers = rest(open)
        stopped = True
    assert statuses(answers) == [200, 200]
    assert sum(calls.values()) > TURN_STEPS >= max(calls.values())


def test_body_of_known_length_is_not_searched_for_requests(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    inherited = HttpToolsProtocol.data_received

    def counting(self: HttpToolsProtocol, data: bytes) -> None:
        calls.append(len(data))
        inherited(self, data)

    body = PING + b"\r\n" * (128 << 10)
    with connected(client) as open:
        open.sendall(POST + b"content-length: %d\r\n\r\n" % len(body))
        protocol = protocol_of(client, open)
        wait_until(lambda: protocol.cycle is not None, "the body is awaited")
        monkeypatch.setattr(HttpToolsProtocol, "data_received", counting)
        client.loop.call_soon_threadsafe(protocol.data_received, body + (GET % b"/healthz") * 100)
        wait_until(lambda: calls, "the body was parsed")
        open.sendall(LAST)
        assert statuses(rest(open)) == [200] * 102
    assert calls[0] == len(body)


# --- chunks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flood",
    [
        chunks(b" " * MAX_FRAMING, 1),
        chunks(b" " * 10, 1) + b"1;" + b"x" * 3 * MAX_FRAMING,
        END[:-2] + b"x: " + b"y" * 3 * MAX_FRAMING,
    ],
    ids=["one-byte chunks", "chunk extension", "trailer"],
)
def test_body_of_mostly_framing_is_refused(client: Client, flood: bytes) -> None:
    with connected(client) as open:
        sent(open, CHUNKED + flood)
        answers = rest(open)
    assert statuses(answers) == [400] and b"small chunks" in answers


@pytest.mark.parametrize("size", [1, 16, 1_000])
def test_body_of_small_chunks_is_read(client: Client, size: int) -> None:
    body = PING.ljust(5_000 * size)
    with connected(client) as open:
        open.sendall(CHUNKED + chunks(body, size) + END + LAST)
        assert statuses(rest(open)) == [200, 200]


# --- bodies of answered requests -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 50_000])
def test_chunked_body_without_end_after_the_answer_is_closed(guarded: Client, size: int) -> None:
    with connected(guarded) as open:
        open.sendall(CHUNKED)
        answers = open.recv(65536)
        sent(open, chunks(b" " * 8 * MAX_UNREAD, size))
        assert statuses(answers + rest(open)) == [401]


@pytest.mark.parametrize(
    "request_",
    [
        CHUNKED + chunks(b" " * (MAX_UNREAD // 2), 1_000) + END,
        POST + b"content-length: 1000000\r\n\r\n" + b"\r\n" * 500_000,
    ],
    ids=["short chunked", "known length"],
)
def test_connection_continues_after_an_unread_body(guarded: Client, request_: bytes) -> None:
    with connected(guarded) as open:
        open.sendall(request_ + LAST)
        assert statuses(rest(open)) == [401, 200]
