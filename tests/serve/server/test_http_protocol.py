"""Limits of an HTTP connection: size and time of request headers and bodies, targets, and HTTP/1.0."""

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.queries.open_databases import Whole
from tests.serve.server.test_pipelined_requests import protocol_of
from tests.serve.server_fixture import Client, NoDatabases, serving
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.config import Secret
from headwater.serve.limits.connection_limits import RESERVE
from headwater.serve.server import http_protocol
from headwater.serve.server.http_protocol import BoundedHttp

HEAD = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n"
LIMIT = BoundedHttp.max_head


@pytest.fixture
def client() -> Iterator[Client]:
    with serving(NoDatabases()) as client:
        yield client


def connected(client: Client) -> socket.socket:
    return socket.create_connection(client.server.addresses[0], PATIENCE)


def rest(open: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    found = b""
    while piece := open.recv(65536):
        found += piece
    return found


def answer(open: socket.socket) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of the only answer, after which the server closes the connection."""
    head, _, body = rest(open).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)


def answer_to(client: Client, request: bytes) -> tuple[int, dict[str, Any]]:
    """Send raw bytes on a new connection; return status and JSON body of the answer."""
    with connected(client) as open:
        open.sendall(request)
        return answer(open)


# --- how large -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        HEAD + b"x: " + b"a" * LIMIT + b"\r\n\r\n",
        HEAD + b"".join(b"x%d: %s\r\n" % (n, b"a" * 1000) for n in range(LIMIT // 1000 + 1)) + b"\r\n",
        b"GET /" + b"a" * LIMIT + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    ],
    ids=["one header", "many headers", "target"],
)
def test_request_head_over_the_size_limit_gets_431(client: Client, request_: bytes) -> None:
    status, problem = answer_to(client, request_)
    assert (status, problem["status"], problem["code"]) == (431, 431, "request_too_large") and problem["hint"]


def test_endless_header_is_rejected_before_one_megabyte(client: Client) -> None:
    with connected(client) as open:
        found = b""
        with contextlib.suppress(ConnectionError):  # the server may close before the end
            open.sendall(HEAD + b"x: " + b"a" * (1 << 20))
        with contextlib.suppress(ConnectionError):
            found = open.recv(65536)
        assert not found or found.startswith(b"HTTP/1.1 431 ")


def test_large_head_within_the_limit_is_served_and_the_next_one_is_counted_from_zero(client: Client) -> None:
    large = {"x": "a" * (LIMIT - 4000)}
    for _ in range(3):
        assert client.http.get("/healthz", headers=large).status_code == 200


def test_memory_counted_for_headers_is_above_the_size_of_their_objects(client: Client) -> None:
    lines = [b"%x: y\r\n" % (0x1000 + number) for number in range(LIMIT // http_protocol.HEADER_BYTES)]
    taken = sum(sys.getsizeof(each) for line in lines for each in (line[:4], line[6:7], (line[:4], line[6:7])))
    assert taken + 8 * len(lines) < LIMIT, "with a pointer in the list of headers"
    assert answer_to(client, HEAD + b"".join(lines) + b"\r\n")[0] == 431
    assert client.http.get("/healthz", headers={line[:4].decode(): "y" for line in lines[:200]}).status_code == 200


def text_bytes(value: Any) -> int:
    """Return the bytes of all texts in nested containers."""
    if isinstance(value, dict):
        return text_bytes([*value, *value.values()])
    if isinstance(value, list | tuple):
        return sum(text_bytes(each) for each in value)
    return len(value) if isinstance(value, bytes | bytearray | str) else 0


@pytest.mark.parametrize(
    "request_",
    [
        HEAD + b"x: " + b"a" * 60_000 + b"\r\n\r\n",
        HEAD + b"".join(b"%d: y\r\n" % (10_000 + number) for number in range(200)) + b"\r\n",
        b"GET /healthz?" + b"a" * 60_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        HEAD + b"content-length: 60000\r\n\r\n" + b"a" * 60_000,
    ],
    ids=["one header", "many headers", "target", "body"],
)
def test_idle_connection_keeps_nothing_of_its_last_request(client: Client, request_: bytes) -> None:
    with connected(client) as open:
        protocol = protocol_of(client, open)
        open.sendall(request_)
        assert open.recv(65536).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: protocol.cycle.response_complete and not protocol._in_body, "the request is answered")
        wait_until(lambda: text_bytes([vars(protocol), vars(protocol.cycle)]) < 1_000, "the request is dropped")
        open.sendall(HEAD + b"connection: close\r\n\r\n")
        assert rest(open).startswith(b"HTTP/1.1 200 ")


# --- how long --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [b"G", b"GET /healthz HTTP/1.1\r\nhost", HEAD])
def test_incomplete_request_head_gets_408_after_the_head_timeout(
    client: Client, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttp, "head_seconds", 0.05)
    status, problem = answer_to(client, part)
    assert status == problem["status"] == 408 and problem["hint"]


def test_incomplete_second_request_head_on_a_connection_times_out(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(client) as open:
        open.sendall(HEAD + b"\r\n" + HEAD[:5])  # part of the second head comes with the first
        found = b""
        while not found.endswith(b"}"):
            found += open.recv(65536)
        assert found.startswith(b"HTTP/1.1 200 ")
        protocol = protocol_of(client, open)
        assert protocol._too_slow is not None
        client.loop.call_soon_threadsafe(protocol._too_slow.cancel)
        monkeypatch.setattr(BoundedHttp, "head_seconds", 0.05)
        client.loop.call_soon_threadsafe(protocol._watch)
        open.sendall(HEAD[5:])
        assert rest(open).startswith(b"HTTP/1.1 408 ")


def test_head_timeout_is_cancelled_when_the_head_is_complete(client: Client) -> None:
    with connected(client) as open:
        open.sendall(HEAD)
        protocol = protocol_of(client, open)
        wait_until(lambda: protocol._too_slow is not None, "the head has a deadline")
        timer = protocol._too_slow
        open.sendall(b"x: y\r\n\r\n")
        assert open.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert timer.cancelled() and protocol._too_slow is None


@pytest.mark.parametrize("said", [b"", b"\r\n", b"\r\n\r\n"])
def test_idle_connection_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.serve.server.server.KEEP_ALIVE_SECONDS", 0.05)
    closed = contextlib.suppress(ConnectionError)  # it may be by now
    with serving(NoDatabases()) as client, connected(client) as open, closed:
        open.sendall(said)
        assert rest(open) == b""


# --- what it says ----------------------------------------------------------------------------------------


def test_malformed_request_gets_a_problem_response(client: Client) -> None:
    status, problem = answer_to(client, b"\x16\x03\x01 nonsense\r\n\r\n")
    assert (status, problem["code"]) == (400, "invalid_request") and problem["hint"]


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://evil.example/", "127.0.0.1", 403),
        ("HTTP://evil.example:80/", "127.0.0.1", 403),
        ("http://127.0.0.1@evil.example/", "127.0.0.1", 403),
        ("http://evil.example@127.0.0.1/", "127.0.0.1", 403),
        ("http://127.0.0.1:99/", "127.0.0.1", 200),
        ("http://[::1]/", "evil.example", 200),
        ("/", "evil.example", 403),
        ("/", "127.0.0.1", 200),
        ("//evil.example/", "127.0.0.1", 404),
    ],
)
def test_authority_in_the_target_replaces_the_host(client: Client, target: str, host: str, status: int) -> None:
    found, _ = answer_to(client, f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    assert found == status


def test_http_1_0_is_answered_and_closed(client: Client) -> None:
    assert answer_to(client, b"GET /healthz HTTP/1.0\r\n\r\n") == (200, {"status": "ok"})


# --- bodies ----------------------------------------------------------------------------------------------

POST = b"POST /api/v1/rpc HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
PING = b'{"id": 1, "method": "system.ping"}'


@pytest.mark.parametrize(
    "part", [b"content-length: 50\r\n\r\n", b"content-length: 50\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n2\r\n{"]
)
def test_incomplete_request_body_gets_408_after_the_body_timeout(
    client: Client, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttp, "body_seconds", 0.05)
    status, problem = answer_to(client, POST + part)
    assert status == problem["status"] == 408 and problem["code"] == "invalid_request" and problem["hint"]


def test_connection_with_a_slow_body_after_its_response_is_closed(client: Client) -> None:
    with connected(client) as open:
        open.sendall(b"POST /nowhere HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 50\r\n\r\n{")
        found = open.recv(65536)
        protocol = protocol_of(client, open)

        def pass_the_deadline() -> None:
            protocol._body_timer.cancel()
            protocol._body_until = client.loop.time()
            protocol._give_up_body()

        client.loop.call_soon_threadsafe(pass_the_deadline)
        found += rest(open)
    assert found.startswith(b"HTTP/1.1 404 ") and found.count(b"HTTP/1.1 ") == 1


@pytest.mark.slow
def test_slow_body_within_the_rate_is_read(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttp, "body_seconds", 0.2)
    monkeypatch.setattr(BoundedHttp, "body_rate", 1 / PATIENCE)  # PATIENCE for each byte
    with connected(client) as open:
        open.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        open.sendall(POST + b"content-length: %d\r\n\r\n" % len(PING) + PING[:1])  # the head alone has 0.2 s
        open.settimeout(0.02)
        for byte in PING[1:-1]:
            open.sendall(bytes([byte]))
            with pytest.raises(TimeoutError):  # nothing is said before it is there
                open.recv(1)
        open.settimeout(PATIENCE)
        open.sendall(PING[-1:])
        assert open.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_body_timeout_is_cancelled_when_the_body_is_complete(client: Client) -> None:
    with connected(client) as open:
        protocol = protocol_of(client, open)
        for _ in range(3):
            open.sendall(POST + b"content-length: %d\r\n\r\n" % len(PING))
            wait_until(lambda: protocol._body_timer is not None, "the body has a deadline")
            timer = protocol._body_timer
            open.sendall(PING)
            assert b" 200 " in open.recv(65536)
            assert timer.cancelled() and protocol._body_timer is None


# --- how many --------------------------------------------------------------------------------------------


def gauge(client: Client, name: str) -> float:
    text = client.http.get("/metrics").text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("setting", ["max_connections", "max_connections_per_client"])
def test_connection_over_the_limit_may_request_health_only(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "OVER_LIMIT_SECONDS", PATIENCE)
    with serving(NoDatabases(), **{setting: 3}) as client:
        client.ok("system.ping")  # keeps its connection
        with connected(client), connected(client):
            until(lambda: gauge(client, "headwater_connections") == 3)
            for path in (b"/", b"/api/v1/rpc", b"/healthz/x"):
                status, problem = answer_to(client, b"GET %s HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % path)
                assert (status, problem["code"]) == (429, "limit_exceeded") and setting in problem["hint"]
            upgrade = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
            assert answer_to(client, upgrade)[0] == 429
            with connected(client) as open:
                open.sendall(HEAD + b"\r\n")
                assert open.recv(65536).startswith(b"HTTP/1.1 200 ")
            client.ok("system.ping")
            assert gauge(client, 'headwater_limited_total{db="",limit="connections"}') == 5
        until(lambda: gauge(client, "headwater_connections") == 1)
        with connected(client) as open:
            open.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert open.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_connection_above_the_limit_and_its_reserve_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "OVER_LIMIT_SECONDS", PATIENCE)
    with serving(NoDatabases(), max_connections=1) as client:
        client.ok("system.ping")
        held = [connected(client) for _ in range(RESERVE)]
        until(lambda: gauge(client, "headwater_connections") == 1 + RESERVE)
        with connected(client) as open, contextlib.suppress(ConnectionError):
            assert open.recv(1) == b""
        for each in held:
            each.close()


# --- stalled readers -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_connection_with_an_unread_answer_is_closed(tmp_path: Path) -> None:
    with Whole(tmp_path) as databases, serving(databases, stall_seconds=0.2) as client:
        body = json.dumps({"sql": "SELECT printf('%.4000000c', 'x')"}).encode()
        ask = b"POST /api/v1/sql/exec HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        with socket.socket() as open:
            open.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            open.settimeout(PATIENCE)
            open.connect(client.server.addresses[0])
            for _ in range(4):  # more than all buffers hold
                open.sendall(ask + b"content-length: %d\r\n\r\n" % len(body) + body)
            answered = open.recv(1)
            until(lambda: gauge(client, "headwater_connections") == 1)
            assert answered == b"H"


@pytest.mark.slow
def test_slowly_read_answer_is_complete(tmp_path: Path) -> None:
    with Whole(tmp_path) as databases, serving(databases, stall_seconds=PATIENCE) as client:
        body = json.dumps({"sql": "SELECT printf('%.3000000c', 'x')"}).encode()
        with socket.socket() as open:
            open.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            open.settimeout(PATIENCE)
            open.connect(client.server.addresses[0])
            open.sendall(POST.replace(b"rpc", b"sql/exec") + b"connection: close\r\n")
            open.sendall(b"content-length: %d\r\n\r\n" % len(body) + body)
            size = 0
            while piece := open.recv(65536):
                size += len(piece)
                time.sleep(0.02)  # the slowness that is tested
            assert size > 3_000_000


def test_trailer_after_a_chunked_body_is_not_used_as_a_header() -> None:
    body = b'{"id": 1, "method": "system.ping"}'
    head = b"POST /api/v1/rpc HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\ntransfer-encoding: chunked\r\n"
    chunk = b"\r\n%x\r\n%s\r\n0\r\n" % (len(body), body)
    credential = b"authorization: Bearer s3cret-token\r\n"
    with serving(NoDatabases(), token=Secret("s3cret-token")) as client:
        assert answer_to(client, head + credential + chunk + b"\r\n")[0] == 200
        assert answer_to(client, head + chunk + credential + b"\r\n")[0] == 401


UPGRADE = (
    b"GET /api/v1/ws HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@pytest.mark.parametrize("verb", [b"GET", b"POST"])
@pytest.mark.parametrize(
    "body",
    [
        b"content-length: 5\r\n\r\nhello",
        b"content-length: 5\r\n\r\n",  # the body never comes
        b"content-length: 1000000000\r\n\r\n" + b"x" * 100_000,
        b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 10_000,
        b"content-length: %d\r\n\r\n%b" % (len(HEAD) + 2, HEAD + b"\r\n"),  # a request inside the body
    ],
)
def test_websocket_upgrade_with_a_body_is_closed_without_an_answer(client: Client, verb: bytes, body: bytes) -> None:
    with connected(client) as open:
        open.sendall(UPGRADE + b"\r\n")
        assert open.recv(12) == b"HTTP/1.1 101", "without a body it is a WebSocket"
    found = b""
    with connected(client) as open, contextlib.suppress(ConnectionError):  # a reset, where bytes were left unread
        open.sendall(UPGRADE.replace(b"GET", verb) + body)
        while piece := open.recv(65536):
            found += piece
    assert found == b""
    assert answer_to(client, HEAD + b"connection: close\r\n\r\n")[0] == 200


def test_body_outside_of_a_request_raises_value_error(client: Client) -> None:
    """The parser in use ends an upgrade at its head; another parser may pass on the body."""
    with connected(client) as open:
        open.sendall(HEAD + b"\r\n")
        assert open.recv(12) == b"HTTP/1.1 200"
        protocol = protocol_of(client, open)
        with pytest.raises(ValueError, match="an upgrade has a body"):
            protocol.on_body(b"hello")


def test_malformed_requests_do_not_fill_the_log(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        assert answer_to(client, b"\x16\x03\x01 hello\r\n\r\n")[0] == 400
    assert len([each for each in caplog.records if "Invalid HTTP request" in each.message]) <= 1
