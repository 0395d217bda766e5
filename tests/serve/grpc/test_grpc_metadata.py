"""Limits on the metadata of gRPC calls, over a raw connection: a gRPC client would not send so much of it."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.serve.http2 import CONTINUATION, END_HEADERS, END_STREAM, HEADERS, PREFACE, field, frame, headers
from tests.serve.server_fixture import NoDatabases, serving
from tests.suite.deadlines import PATIENCE

from headwater.config import Secret
from headwater.serve.grpc import server

LOCKED = {"token": Secret("t"), "http": "127.0.0.1:0"}
CREDENTIAL = (("authorization", "Bearer t"),)
CHECK, GET = "/grpc.health.v1.Health/Check", "/sochdb.v1.KvService/Get"


@contextlib.contextmanager
def connected(client: Any) -> Iterator[socket.socket]:
    """A connection that has not acknowledged the server's SETTINGS, so that gRPC does not limit metadata yet."""
    host, _, port = client.server.grpc_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(PREFACE)
        yield connection


def trailers(connection: socket.socket) -> bytes:
    """Return the trailers of the only call, still encoded."""
    received = connection.makefile("rb")
    while head := received.read(9):
        payload = received.read(int.from_bytes(head[:3], "big"))
        if head[3] == HEADERS and head[4] & END_STREAM:
            return payload
    raise AssertionError("the connection was closed without trailers")


@pytest.mark.parametrize("path", [CHECK, GET, "/no.such/Method"])
def test_call_with_too_many_metadata_entries_is_refused(path: str) -> None:
    entries = field(b"a", b"b") * 1000
    with serving(NoDatabases(), **LOCKED) as client, connected(client) as connection:
        connection.sendall(frame(HEADERS, 0, headers(path), 1))
        for _ in range(3):
            connection.sendall(frame(CONTINUATION, 0, entries, 1))
        connection.sendall(frame(CONTINUATION, END_HEADERS, b"", 1))
        assert b"3000 metadata entries" in trailers(connection)


def test_call_with_allowed_metadata_entries_is_answered() -> None:
    metadata = [*CREDENTIAL, *((f"key-{number}", "value") for number in range(100))]
    with serving(NoDatabases(), **LOCKED) as client, grpc.insecure_channel(client.server.grpc_address) as found:
        stub = health_pb2_grpc.HealthStub(found)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE, metadata=metadata)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_connection_that_does_not_acknowledge_settings_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SETTINGS_SECONDS", 0.2)
    with serving(NoDatabases(), **LOCKED) as client, connected(client) as connection:
        connection.sendall(frame(HEADERS, 0, headers(GET), 1))
        connection.sendall(frame(CONTINUATION, 0, field(b"a", b"b") * 1000, 1))  # the header block never ends
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 16):
                pass
