"""Large and unfinished bodies of requests: what they may cost."""

import asyncio
import contextlib
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.serve.server_fixture import Client, NoDatabases, envelope, serving
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.config import ServeConfig
from headwater.errors import Busy, InvalidRequest, RequestTooLarge
from headwater.model.principal import Principal
from headwater.serve.api import Api
from headwater.serve.gateway import messages
from headwater.serve.http.handlers import rows
from headwater.serve.limits import request_body as bodies
from headwater.serve.limits.limits import Limits
from headwater.serve.limits.request_body import (
    LARGE,
    MAX_ELEMENTS,
    BodyMemory,
    check_elements,
)
from headwater.serve.limits.stream_limits import StreamCounts
from headwater.serve.metrics.metrics import Metrics
from headwater.serve.rpc import envelope as rpc
from headwater.serve.rpc import query_methods
from headwater.serve.thread_bridge import Bridge

LISTS = b"[" + b"[]," * MAX_ELEMENTS + b"[]]"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(NoDatabases()) as found:
        yield found


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["system.ping", "query.select", "data.insert"])
def test_request_with_too_many_elements_is_refused(client: Client, method: str) -> None:
    body = b'{"id":1,"method":"%s","params":{"args":%s}}' % (method.encode(), LISTS)
    answer = envelope(client.http.post("/api/v1/rpc", content=body, headers=JSON).json(), 1)
    assert answer["error"]["code"] == "request_too_large"
    assert "several requests" in answer["error"]["details"]["hint"]


def test_protocol_version_of_a_large_envelope_is_refused_without_decoding_it(client: Client) -> None:
    body = b'{"id":1,"method":"system.ping","skeinql":%s}' % LISTS
    tracemalloc.start()
    try:
        rpc._envelope(body)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()
    answer = envelope(client.http.post("/api/v1/rpc", content=body, headers=JSON).json(), 1)
    assert answer["error"]["code"] == "unsupported_version"


def test_marks_inside_texts_are_not_counted() -> None:
    text = '[{,:"' * MAX_ELEMENTS + "\\"
    check_elements(json.dumps([text, 1, text]).encode(), MAX_ELEMENTS)
    with pytest.raises(RequestTooLarge):
        check_elements(json.dumps([text, *range(MAX_ELEMENTS), text]).encode(), MAX_ELEMENTS)
    with pytest.raises(RequestTooLarge):
        check_elements(json.dumps(["a"] * (MAX_ELEMENTS + 2)).encode(), MAX_ELEMENTS)


def test_row_and_gateway_message_with_too_many_elements_are_refused() -> None:
    with pytest.raises(RequestTooLarge):
        rows._columns(b'{"name":%s}' % LISTS)
    asked = messages.read((b'{"id":1,"type":"sql","payload":%s}' % LISTS).decode())
    assert isinstance(asked.error, RequestTooLarge)


class NoJson:
    """Stands for the module json where it must not be used."""

    @staticmethod
    def loads(text: bytes) -> Any:
        raise AssertionError("a large body was decoded once more")


@pytest.mark.parametrize("path", ["/api/v1/rpc", "/api/v1/sql/exec"])
@pytest.mark.parametrize(
    ("text", "told"), [("a", "the body is not JSON"), (r"\ud800", "half a character"), (r"\ude00", "half a character")]
)
def test_large_malformed_body_is_not_decoded_by_a_second_parser(
    client: Client, path: str, text: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "json", NoJson)
    content = b'{"x":"' + text.encode() + b'","y":[' + b"1," * LARGE
    response = client.http.post(path, content=content, headers=JSON)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


def test_large_body_is_decoded_in_a_thread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    decode = rpc._envelope

    def noted(body: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return decode(body)

    monkeypatch.setattr(rpc, "_envelope", noted)
    body = b'{"id":1,"method":"system.ping","params":{' + b" " * LARGE + b"}}"
    assert client.http.post("/api/v1/rpc", content=body, headers=JSON).json()["ok"]
    assert threads[0].startswith("headwater-read")


@pytest.mark.parametrize("method", ["query.select", "query.prepare", "query.explain", "query.patch"])
def test_large_form_of_a_query_is_parsed_in_a_thread(
    client: Client, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(*_: Any, **__: Any) -> Any:
        threads.append(threading.current_thread().name)
        raise InvalidRequest("noted")

    monkeypatch.setattr(query_methods, "parse_query_of", noted)
    body = b'{"id":1,"method":"%s","params":{"query":{}%s}}' % (method.encode(), b" " * rpc.LARGE)
    answer = client.http.post("/api/v1/rpc", content=body, headers=JSON).json()
    assert answer["error"]["message"] == "noted"
    assert threads[0].startswith("headwater-read")


@pytest.mark.parametrize("body", [b"[", b"[]", b'{"sql":"DELETE FROM t"}'])
def test_statement_of_a_viewer_is_refused_before_it_is_decoded(body: bytes) -> None:
    bridge, api = Bridge(threads=1), Api.over(NoDatabases())
    made = rpc.Rpc(api, bridge, Metrics(dict), Limits(ServeConfig(), api, StreamCounts(1)))
    try:
        status, reply = asyncio.run(made.sql(Principal("somebody", "viewer"), body, "somewhere"))
    finally:
        bridge.close()
    assert isinstance(reply, bytes)
    assert (status, json.loads(reply)["error"]["code"]) == (200, "forbidden")


# --- receiving -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def unfinished(client: Client, size: int) -> Iterator[socket.socket]:
    """A request of which the last byte of its body does not arrive."""
    host, port = client.http.base_url.host, client.http.base_url.port
    with socket.create_connection((host, port or 0), timeout=PATIENCE) as connection:
        head = b"POST /api/v1/rpc HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % (host.encode(), size) + b" " * (size - 1))
        yield connection


def test_unfinished_bodies_of_one_address_are_limited(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = BodyMemory(4 << 20)
    monkeypatch.setattr(bodies, "BODIES", memory)
    with contextlib.ExitStack() as opened:
        for _ in range(2):
            opened.enter_context(unfinished(client, 1 << 20))
        wait_until(lambda: memory.used == 2 * ((1 << 20) - 1), "the bodies were received")
        refused = client.http.post("/api/v1/rpc", content=b" " * (1 << 20), headers=JSON)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "busy"
        assert "retry-after" in refused.headers
        assert client.rpc("system.ping")["ok"]  # small ones are not counted
    wait_until(lambda: memory.used == 0, "the memory was released")
    answered = client.http.post("/api/v1/rpc", content=b" " * (1 << 20), headers=JSON)
    assert answered.status_code == 400


def test_address_gets_half_of_the_memory_of_bodies() -> None:
    memory = BodyMemory(10)
    memory.take("a", 5)
    with pytest.raises(Busy):
        memory.take("a", 1)
    memory.take("b", 4)
    with pytest.raises(Busy):
        memory.take("c", 2)
    memory.release("a", 5)
    memory.take("c", 5)
    assert memory.used == 9


def test_body_that_does_not_end_in_time_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.1)
    with unfinished(client, 1 << 20) as connection:
        assert connection.recv(12) == b"HTTP/1.1 408"


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_body_counts_until_its_request_is_answered(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, go_on = BodyMemory(4 << 20), threading.Event()
    monkeypatch.setattr(bodies, "BODIES", memory)
    decode = rpc._envelope

    def held(body: bytes) -> Any:
        assert go_on.wait(PATIENCE)
        return decode(body)

    monkeypatch.setattr(rpc, "_envelope", held)
    body = b'{"id":1,"method":"system.ping","params":{' + b" " * LARGE + b"}}"
    with ThreadPoolExecutor(1) as threads:
        try:
            answer = threads.submit(client.http.post, "/api/v1/rpc", content=body, headers=JSON)
            wait_until(lambda: memory.used == len(body), "the whole body counts")
        finally:
            go_on.set()
        assert answer.result().json()["ok"]
    wait_until(lambda: memory.used == 0, "the memory was released")


def test_requests_are_decoded_without_the_slow_parser_of_numbers(client: Client) -> None:
    decoders = [rpc._envelopes, rpc._objects, *rpc._PARAMS.values(), messages._messages, *messages._payloads.values()]
    assert all(each.float_hook is not None for each in decoders)
    numbers = f"[{','.join(['61739086064701751884e99', '1e308'] * 20_000)}]"
    body = f'{{"id": 1, "method": "query.select", "params": {{"sql": "SELECT 1", "args": {numbers}}}}}'
    answer = client.http.post("/api/v1/rpc", content=body, headers={"content-type": "application/json"})
    assert answer.json()["error"]["code"] == "invalid_request", "more than can be bound"
    asked = messages.read(f'{{"id": 1, "type": "sql", "payload": {{"query": "SELECT 1", "params": {numbers}}}}}')
    assert asked.error is None
