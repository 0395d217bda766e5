"""Random WebSocket frames of a client: an answer, or a close with a reason, and never an internal error.

The gateway answers every frame and stays; the streams take acks and pauses and close on anything else; bytes that are
no frames at all end the connection. `make soak` sends 10,000 more.
"""

import base64
import contextlib
import json
import logging
import secrets
import socket as sockets
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance.gateway_client import GatewayClient
from tests.queries.open_databases import Whole
from tests.serve.fuzz_cases import cases
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from headwater.serve.gateway.messages import TYPES
from headwater.serve.http.routes import ROUTES

SEED = 20261116
MEANT = {1000, 1002, 1003, 1007, 1008, 1009, 1010, 4400}  # closes that are the client's own doing
STREAMS = ("cdc", "query")


class Served(Client):
    """A server, with a subscription and a query to listen to."""

    def furnish(self) -> None:
        """Create what frames refer to again: earlier frames may have removed it."""
        self.ok("sql.exec", sql="CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, v TEXT, b BLOB)")
        query = self.ok("query.prepare", sql="SELECT id FROM t WHERE id = ?")["query_id"]
        sub = self.ok("cdc.subscribe_table", table="t")["sub_id"]
        self.paths = {"cdc": f"/api/v1/cdc/ws/{sub}", "query": f"/api/v1/q/{query}/events?args=[1]"}

    @property
    def address(self) -> str:
        return str(self.http.base_url)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Whole(tmp_path_factory.mktemp("sockets")) as whole, serving(whole) as client:
        client.__class__ = Served
        yield client  # type: ignore[misc]


# --- what is sent --------------------------------------------------------------------------------------------

NAMES = sorted({name for kind in TYPES.values() for name in kind.__struct_fields__})
SQL = [
    "SELECT 1",
    "SELECT * FROM t",
    "INSERT INTO t(v) VALUES (?)",
    "DELETE FROM t",
    "SELECT ?",
    "SELEC",
    "BEGIN",
    "\0",
]
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
value = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))
lit = st.fixed_dictionaries({"t": st.sampled_from(["i64", "str", "bytes", "json", "dec", "nope"]), "v": plain})
small = st.sampled_from(["", "k", "default", "main", "t", "kv", "insert", "delete", "AP8=", *SQL])
field = small | value | lit | st.lists(small | plain | lit, max_size=3) | st.integers(-2, 70)
payload = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), field, max_size=4)
fitting = st.one_of(
    st.tuples(st.just("sql"), st.fixed_dictionaries({"query": small}, optional={"params": st.lists(plain | lit)})),
    st.tuples(st.just("kv_get"), st.fixed_dictionaries({"key": st.text()})),
    st.tuples(st.just("kv_put"), st.fixed_dictionaries({"key": small, "value": st.text()})),
    st.tuples(st.just("kv_delete"), st.fixed_dictionaries({"key": small})),
    st.tuples(st.just("subscribe"), st.fixed_dictionaries({}, optional={"tables": st.just(["t"]), "where": small})),
    st.tuples(st.just("unsubscribe"), st.fixed_dictionaries({"id": st.integers(0, 9)})),
)
kind = st.sampled_from(sorted(TYPES)) | st.text(max_size=8)
asked = fitting | st.tuples(kind, payload | value)
id = st.integers(0, 9) | st.text(max_size=5) | plain
message = st.builds(lambda id, asked: dumped({"id": id, "type": asked[0], "payload": asked[1]}), id, asked)
gateway_frame = st.one_of(message, message, st.text(), st.binary(), value.map(lambda found: dumped(found)))
ack = st.fixed_dictionaries({}, optional={"ack": st.integers(-1, 99) | plain, "pause": st.booleans() | plain})
stream_frame = st.one_of(ack.map(lambda found: dumped(found)), st.text(), st.binary(), value.map(lambda f: dumped(f)))


def dumped(found: Any) -> str:
    return json.dumps(found, ensure_ascii=False).encode("utf-8", "replace").decode()


@st.composite
def raw(draw: st.DrawFn) -> bytes:
    """Bytes that look like frames: any opcode, flags, lengths that lie, masked or not."""
    first = draw(st.sampled_from([0x81, 0x82, 0x01, 0x80, 0x88, 0x89, 0x8A]) | st.integers(0, 255))
    body = draw(st.binary(max_size=200))
    length = draw(st.just(len(body)) | st.integers(0, 2**63))
    masked = 0x80 if draw(st.integers(0, 3)) else 0
    if length < 126:
        head = struct.pack("!BB", first, masked | length)
    elif length < 1 << 16:
        head = struct.pack("!BBH", first, masked | 126, length)
    else:
        head = struct.pack("!BBQ", first, masked | 127, length)
    return head + (draw(st.binary(min_size=4, max_size=4)) if masked else b"") + body


# --- what comes back -----------------------------------------------------------------------------------------


def told_to_gateway(served: Served, frames: list[str | bytes]) -> None:
    """Send frames to the gateway; check that each gets one answer and the socket still works."""
    client = GatewayClient(served.address)
    try:
        for frame in frames:
            client.socket.send(frame)
            found = client.answer()
            while found["type"] == "error" and found["payload"]["message"].startswith("the database was dropped"):
                found = client.answer()
            assert found["payload"].get("code") != "internal", (frame, found)
            known = known_id(frame)
            assert known is None or found["id"] == known, (frame, found)
        assert client.ok("ping", id="last")
    finally:
        client.close()


def known_id(frame: str | bytes) -> Any:
    """Return the id of a message, if it is valid."""
    try:
        found = json.loads(frame, parse_constant=_no_json) if isinstance(frame, str) else None
    except (ValueError, RecursionError):
        return None
    id = found.get("id") if isinstance(found, dict) else None
    is_number = type(id) is int and -(2**63) <= id < 2**63
    return id if is_number or (isinstance(id, str) and len(id) <= 200 and "\ud800" not in id) else None


def _no_json(word: str) -> None:
    """Refuse NaN and Infinity, which Python writes and reads."""
    raise ValueError(word)


def told_to_stream(served: Served, name: str, frames: list[str | bytes]) -> None:
    """Send frames to a stream; check that it continues, or closes with a code that blames the client."""
    url = served.address.replace("http", "ws", 1) + served.paths[name]
    client = connect(url, open_timeout=PATIENCE, close_timeout=1, compression=None, proxy=None)
    with client, contextlib.suppress(ConnectionClosed):
        for frame in frames:
            client.send(frame)
    assert client.close_code in MEANT, (frames, client.close_code, client.close_reason)


def told_raw(served: Served, path: str, pieces: list[bytes]) -> None:
    """Send bytes after the upgrade; check that the server closes the connection or waits for more."""
    where = served.http.base_url
    with sockets.create_connection((where.host, where.port), PATIENCE) as client:
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        asked = f"GET {path} HTTP/1.1\r\nHost: {where.host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        client.sendall(f"{asked}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 101"
        with contextlib.suppress(ConnectionError, OSError):  # closed while we wrote
            for piece in pieces:
                client.sendall(piece)
            client.shutdown(sockets.SHUT_WR)
            while client.recv(1 << 16):
                pass


def run(served: Served, strategy: Any, check: Callable[[Any], None], examples: int, number: int) -> None:
    """Check `examples` cases."""

    @cases(examples, number)
    @given(strategy)
    def one(case: Any) -> None:
        check(case)

    served.furnish()
    one()
    assert served.http.get("/healthz").status_code == 200


def hostile(served: Served, name: str, examples: int, number: int) -> None:
    """Send random frames to one of the routes; check that the server logs no error."""
    several = st.lists(gateway_frame if name == "gateway" else stream_frame, min_size=1, max_size=6)
    if name == "gateway":
        run(served, several, lambda frames: told_to_gateway(served, frames), examples, number)
    elif name in STREAMS:
        run(served, several, lambda frames: told_to_stream(served, name, frames), examples, number)
    else:
        served.furnish()
        paths = ["/api/v1/ws", *served.paths.values()]
        pairs = st.tuples(st.sampled_from(paths), st.lists(raw() | st.binary(max_size=50), min_size=1, max_size=4))
        run(served, pairs, lambda case: told_raw(served, *case), examples, number)


def test_every_websocket_is_here() -> None:
    found = {route.path for route in ROUTES if route.websocket}
    assert found == {"/api/v1/ws", "/api/v1/cdc/ws/{sub_id}", "/api/v1/q/{query_id}/events"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gateway", *STREAMS, "raw"])
def test_random_websocket_frames_cause_no_internal_error(
    served: Served, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    print(f"seed {SEED}")
    hostile(served, name, 60, SEED)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.soak(seconds=60)
@pytest.mark.parametrize("name", ["gateway", *STREAMS, "raw"])
def test_ten_thousand_hostile_frames_cause_no_internal_error(
    served: Served, name: str, caplog: pytest.LogCaptureFixture, fresh_number: int
) -> None:
    hostile(served, name, 2_500, fresh_number)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
