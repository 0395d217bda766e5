"""One client of the gateway: the inbox is bounded, and a flood of requests is answered."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conformance.gateway_client import GatewayClient
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE

from headwater.errors import LimitExceeded
from headwater.model.principal import ANONYMOUS
from headwater.serve.gateway import gateway, messages
from headwater.serve.gateway import socket as gateway_socket
from headwater.serve.gateway.socket import MOST_BYTES, MOST_WAITING, GatewaySocket, Inbox, ReceivedRequest
from headwater.serve.limits.request_body import LARGE


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Whole(tmp_path_factory.mktemp("gateway_socket")) as whole, serving(whole) as found:
        yield found


async def settled(inbox: Inbox, texts: list[str]) -> tuple[int, list[str | None]]:
    """Return how many requests fit before a reader takes any, and what the reader then receives."""
    inside = 0

    async def fill() -> None:
        nonlocal inside
        for text in texts:
            await inbox.put(ReceivedRequest(text, len(text)))
            inside += 1

    filling = asyncio.ensure_future(fill())
    for _ in range(3 * len(texts)):
        await asyncio.sleep(0)  # every turn that it could use
    held = inside
    taken = [(await inbox.take()).text for _ in texts]
    await filling
    return held, taken


def test_inbox_is_bounded_and_ordered() -> None:
    texts = [str(number) for number in range(3 * MOST_WAITING)]
    assert asyncio.run(settled(Inbox(), texts)) == (MOST_WAITING, texts)


def test_inbox_is_bounded_in_bytes() -> None:
    texts = ["x" * (MOST_BYTES // 3)] * 9
    assert asyncio.run(settled(Inbox(), texts)) == (4, texts)
    large = ["y" * (5 * MOST_BYTES), "z"]
    assert asyncio.run(settled(Inbox(), large)) == (1, large), "one that is larger than all of it goes in alone"


def test_subscriptions_encode_no_frames_until_the_socket_accepts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def noted(id: int, piece: bytes) -> bytes:
        made.append(id)
        return piece

    class OnePiece:
        ending = None

        def __init__(self) -> None:
            self.pieces = [b"piece"]

        async def next(self) -> bytes | None:
            return self.pieces.pop() if self.pieces else None

    async def main() -> None:
        reads = asyncio.Event()

        async def raw(_: Any) -> None:
            await reads.wait()

        call: Any = SimpleNamespace(who=ANONYMOUS, scope={"client": ("127.0.0.1", 1), "headers": []}, raw=raw)
        answer: Any = None
        socket = GatewaySocket(call, answer, most=1)
        for id in range(3):
            stream: Any = OnePiece()
            socket.follow(id, stream, lambda: None)
        following = list(socket._followed.values())
        for _ in range(10):
            await asyncio.sleep(0)  # every turn that they could use
        assert made == [0]
        reads.set()
        await asyncio.gather(*following)
        assert made == [0, 1, 2]

    monkeypatch.setattr(gateway_socket, "event_frames", noted)
    asyncio.run(main())


@pytest.mark.slow
def test_flood_of_requests_with_unread_answers_is_answered_later(client: Client) -> None:
    """The server stops reading: what it was sent waits in the sockets, and the sender waits too."""
    gateway = GatewayClient(str(client.http.base_url), max_queue=1)
    number, size = 1_500, 40_000
    query = f"SELECT zeroblob({size * 3 // 4})"  # 60 MB of answers
    sent = threading.Event()

    def flood() -> None:
        for place in range(number):
            gateway.send("sql", {"query": query}, id=place)
        sent.set()

    thread = threading.Thread(target=flood)
    thread.start()
    for place in range(number):
        found = gateway.answer()
        assert found["id"] == place and len(found["payload"]["rows"][0][0]) == size
    thread.join()
    assert sent.is_set() and gateway.ok("ping")
    gateway.close()


def test_slow_statement_blocks_only_its_own_socket(client: Client) -> None:
    slow, other = (GatewayClient(str(client.http.base_url)) for _ in range(2))
    long = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000000) SELECT count(*) FROM n"
    asked = [slow.send("sql", {"query": long}), slow.send("ping")]
    assert other.ok("ping")
    assert [slow.answer()["id"] for _ in asked] == asked
    for each in (slow, other):
        each.close()


def test_large_answers_are_encoded_in_a_thread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, texts, rows = list[int](), gateway.text_field, messages.rows_payload

    def text_field(*args: Any) -> bytes:
        threads.append(threading.get_ident())
        return texts(*args)

    def rows_payload(*args: Any) -> bytes:
        threads.append(threading.get_ident())
        return rows(*args)

    monkeypatch.setattr(gateway, "text_field", text_field)
    monkeypatch.setattr(messages, "rows_payload", rows_payload)
    client.rows("CREATE TABLE large(id INTEGER PRIMARY KEY, v TEXT)")
    with contextlib.closing(GatewayClient(str(client.http.base_url))) as caller:
        caller.ask("kv_put", {"key": "k", "value": "x" * 100_000})
        assert len(caller.ask("kv_get", {"key": "k"})["payload"]["value"]) == 100_000
        sql = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000)"
        sql += " INSERT INTO large(v) SELECT 'x' FROM n RETURNING id"
        assert len(caller.ask("sql", {"query": sql})["payload"]["rows"]) == 1_000
    loop = asyncio.run_coroutine_threadsafe(_ident(), client.loop).result(PATIENCE)
    assert len(threads) == 2 and loop not in threads


def test_large_message_is_decoded_in_a_thread(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, read = list[int](), messages.read

    def noted(text: str | None) -> messages.Request:
        threads.append(threading.get_ident())
        return read(text)

    monkeypatch.setattr(messages, "read", noted)
    with contextlib.closing(GatewayClient(str(client.http.base_url))) as caller:
        assert caller.ok("ping")
        assert caller.ok("sql", {"query": "SELECT length(?)", "params": ["x" * LARGE]})["rows"] == [[LARGE]]
    loop = asyncio.run_coroutine_threadsafe(_ident(), client.loop).result(PATIENCE)
    assert [thread == loop for thread in threads] == [True, False]


@pytest.mark.parametrize(
    ("head", "id"),
    [('{"id": "a-1", ', "a-1"), ('{"id":-7,', -7), ('{"type":"ping","id":1,', ""), (r'{"id":"\ud800",', ""), ("[", "")],
)
def test_large_message_over_the_rate_limit_is_not_decoded(
    head: str, id: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, counted = list[Any](), list[Any]()

    def refuse(*_: Any) -> None:
        raise LimitExceeded("too many requests")

    def read(text: str | None) -> messages.Request:
        raise AssertionError("decoded")

    async def say(id: str | int, type: str, payload: bytes) -> None:
        said.append((id, type, json.loads(payload)["code"]))

    monkeypatch.setattr(messages, "read", read)
    none: Any = None
    metrics: Any = SimpleNamespace(gateway_answered=lambda *found: counted.append(found))
    limits: Any = SimpleNamespace(ask=refuse)
    api: Any = SimpleNamespace(databases=None)
    socket: Any = SimpleNamespace(who=ANONYMOUS, client="somewhere", say=say)
    made = gateway.Gateway(api, none, metrics, limits, none, most=1)
    asyncio.run(made._answer(socket, head + " " * LARGE))
    assert said == [(id, "error", LimitExceeded.code)]
    assert counted == [("unknown", LimitExceeded.code)]


async def _ident() -> int:
    return threading.get_ident()
