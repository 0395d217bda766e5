"""Authorization of the JSON gateway: credentials, tickets, origins, roles, scopes, and their end."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.gateway_client import GatewayClient
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import KEY_LIFETIME, PATIENCE
from websockets.exceptions import InvalidStatus

from headwater.config import Secret

ADMIN = "admin-token"
HEADERS = {"x-api-key": ADMIN}
A, B = ({"query": f"SELECT * FROM {table}", "namespace": "shop"} for table in "ab")
PAIR = {"key": "k", "value": "v", "namespace": "shop"}
KEY = {"key": "k", "namespace": "shop"}
MESSAGES: list[tuple[str, dict[str, Any], set[str]]] = [  # type, payload, principals that are not refused
    ("ping", {}, {"owner", "editor", "viewer", "table", "main"}),
    ("sql", A, {"owner", "editor", "table"}),
    ("sql", B, {"owner", "editor"}),
    ("sql", {"query": "DELETE FROM a WHERE k = 7", "namespace": "shop"}, {"owner", "editor"}),
    ("kv_put", PAIR, {"owner", "editor"}),
    ("kv_get", KEY, {"owner", "editor", "viewer"}),
    ("kv_delete", KEY, {"owner", "editor"}),
    ("subscribe", {"namespace": "shop"}, {"owner", "editor", "viewer"}),
    ("subscribe", {"namespace": "shop", "tables": ["a"]}, {"owner", "editor", "viewer", "table"}),
    ("subscribe", {"namespace": "shop", "tables": ["a", "b"]}, {"owner", "editor", "viewer"}),
]
PEOPLE = {  # name -> role and scopes
    "owner": ("owner", None),
    "editor": ("editor", ["shop"]),
    "viewer": ("viewer", ["shop"]),
    "table": ("editor", ["shop.a"]),
    "main": ("owner", ["main"]),
}


class World:
    """A server with credentials, which makes keys and opens gateway sockets with them."""

    def __init__(self, client: Client) -> None:
        self.url, self._client = str(client.http.base_url), client

    def rpc(self, method: str, headers: dict[str, str] = HEADERS, **params: Any) -> Any:
        body = {"id": 1, "method": method, "params": params}
        return self._client.http.post("/api/v1/rpc", json=body, headers=headers).json()["result"]

    def key(self, role: str, scopes: list[str] | None, **more: Any) -> dict[str, Any]:
        held = {} if scopes is None else {"scopes": scopes}
        return self.rpc("security.token.create", name="gateway", role=role, **held, **more)

    def open(self, token: str, **more: Any) -> GatewayClient:
        return GatewayClient(self.url, headers={"authorization": f"Bearer {token}"}, **more)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = Path(tmp_path_factory.mktemp("gateway"))
    with Whole(folder) as files:
        files.create("shop")
        for name in "ab":
            files.run(f"CREATE TABLE {name}(k INTEGER PRIMARY KEY, v TEXT)", db="shop")
        with serving(
            files, folder=folder, token=Secret(ADMIN), cors_origins=("https://good.example",), grpc="off"
        ) as client:
            yield World(client)


def refusal(world: World, **how: Any) -> tuple[int, dict[str, Any]]:
    with pytest.raises(InvalidStatus) as found:
        GatewayClient(world.url, **how)
    return found.value.response.status_code, json.loads(found.value.response.body)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer no"}, {"x-api-key": "no"}], ids=str)
def test_socket_without_a_credential_is_refused(world: World, headers: dict[str, str]) -> None:
    status, body = refusal(world, headers=headers)
    assert (status, body["code"]) == (401, "unauthorized")


def test_gateway_accepts_a_bearer_token_an_api_key_header_or_a_ticket(world: World) -> None:
    ticket = world.rpc("security.ticket.create")["ticket"]
    ways: list[dict[str, Any]] = [
        {"headers": {"authorization": f"Bearer {ADMIN}"}},
        {"headers": HEADERS},
        {"query": f"?ticket={ticket}"},
    ]
    for way in ways:
        client = GatewayClient(world.url, **way)
        assert client.ok("ping")
        client.close()
    assert refusal(world, query="?ticket=x")[0] == 401
    assert refusal(world, headers=HEADERS, query="?from_offset=1")[0] == 400


def test_gateway_socket_from_a_disallowed_origin_gets_403(world: World) -> None:
    status, body = refusal(world, headers={**HEADERS, "origin": "https://evil.example"})
    assert (status, body["code"]) == (403, "forbidden")
    client = GatewayClient(world.url, headers={**HEADERS, "origin": "https://good.example"})
    assert client.ok("ping")
    client.close()


def test_unlocked_server_admits_only_local_pages(tmp_path: Path) -> None:
    with Whole(tmp_path) as files, serving(files) as client:
        open_world = World(client)
        for origin in ("https://evil.example", "null"):
            assert refusal(open_world, headers={"origin": origin})[0] == 403
        page = GatewayClient(open_world.url, headers={"origin": "http://localhost:3000"})
        assert page.ok("ping")
        page.close()


def test_message_is_refused_exactly_to_callers_without_the_right(world: World) -> None:
    for name, (role, scopes) in PEOPLE.items():
        client = world.open(world.key(role, scopes)["token"])
        for type, payload, may in MESSAGES:
            found = client.ask(type, payload)
            refused = found["type"] == "error" and found["payload"]["code"] == "forbidden"
            assert refused == (name not in may), (name, type, payload, found)
        client.close()


def test_database_outside_the_scope_gets_the_same_error_as_a_missing_one(world: World) -> None:
    client = world.open(world.key("editor", ["main"])["token"])
    told = [
        client.error("kv_get", {"key": "k", "namespace": name})["message"].replace(name, "DB")
        for name in ("shop", "absent")
    ]
    assert told[0] == told[1]
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_gateway_sockets_whose_key_is_revoked_or_expires_are_closed_with_4401(world: World, end: str) -> None:
    made = world.key("viewer", ["shop"], **({"expires_in_seconds": KEY_LIFETIME} if end == "expired" else {}))
    client, idle = world.open(made["token"]), world.open(made["token"])
    client.ok("subscribe", {"namespace": "shop"})
    if end == "revoked":
        assert world.rpc("security.token.revoke", id=made["id"])["streams_ended"] == 2
    for each in (client, idle):
        code, reason = each.closed()
        assert code == 4401 and reason is not None and reason.startswith("unauthorized: ")
        each.close()
    with pytest.raises(InvalidStatus):
        world.open(made["token"])


def test_gateway_socket_opened_by_ticket_closes_when_its_key_is_revoked(world: World) -> None:
    made = world.key("viewer", ["shop"])
    ticket = world.rpc("security.ticket.create", {"x-api-key": made["token"]})["ticket"]
    client = GatewayClient(world.url, query=f"?ticket={ticket}")
    assert client.error("kv_put", PAIR)["code"] == "forbidden", "a ticket is as good as its key, and no better"
    world.rpc("security.token.revoke", id=made["id"])
    assert client.closed()[0] == 4401
    client.close()
    assert refusal(world, query=f"?ticket={ticket}")[0] == 401


@pytest.mark.slow
def test_revoking_a_key_closes_the_gateway_socket_of_a_client_that_does_not_read(world: World) -> None:
    """The close frame cannot be sent: the server stops counting the stream at once, and drops the connection later."""
    made = world.key("editor", ["shop"])
    client = world.open(made["token"], max_queue=1)
    client.ok("subscribe", {"namespace": "shop", "tables": ["b"]}, id="s")
    writer = world.open(ADMIN)
    large = {"query": "INSERT INTO b(v) VALUES (?)", "params": ["x" * 900_000], "namespace": "shop"}
    for _ in range(20):  # 18 MB that nobody takes
        writer.ok("sql", large)
    done = threading.Event()

    def revoke() -> None:
        assert world.rpc("security.token.revoke", id=made["id"])["streams_ended"] == 1
        done.set()

    thread = threading.Thread(target=revoke)
    thread.start()
    assert done.wait(PATIENCE)
    thread.join()
    assert writer.ok("ping"), "nobody else waits for it"
    client.closed()
    for each in (client, writer):
        each.close()
