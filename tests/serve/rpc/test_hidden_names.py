"""A database that does not exist, on every route and method: hints name only databases that the caller may see."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.gateway_client import GatewayClient
from tests.queries.open_databases import Whole
from tests.serve.grpc_calls import KV, SUBSCRIPTIONS, calling
from tests.serve.server_fixture import Client, serving

from headwater.config import DatabaseConfig, Secret

ADMIN = "admin-token"
WAY = "--db on the command line, `namespace` in gRPC and the gateway"


class World:
    """A server with credentials, the databases app and hidden, and no main."""

    def __init__(self, client: Client) -> None:
        self.client, self.url = client, str(client.http.base_url)
        client.http.headers["x-api-key"] = ADMIN
        self.tokens = {"admin": ADMIN, "held": self.key(["app", "main"]), "nowhere": self.key(["main"])}

    def key(self, scopes: list[str]) -> str:
        made = self.client.ok("security.token.create", name="x", role="owner", scopes=scopes)
        return str(made["token"])

    def hints(self, name: str) -> Iterator[str]:
        """Return the hints that the caller `name` gets from every route and method about a missing database main."""
        headers = {"x-api-key": self.tokens[name]}
        for method, params in (
            ("sql.exec", {"sql": "SELECT 1"}),
            ("data.get", {"table": {"table": "t"}, "pk": [1]}),
            ("schema.list_tables", {}),
            ("stats.snapshot", {}),
            ("cdc.subscribe_table", {"table": "t"}),
            ("query.select", {"sql": "SELECT 1"}),
            ("pull.describe", {"table": "t"}),
        ):
            body = {"id": 1, "method": method, "params": params}
            error = self.client.http.post("/api/v1/rpc", json=body, headers=headers).json()["error"]
            assert error["code"] == "not_found", error
            yield error["details"]["hint"]
        for path in ("changes/main", "snapshot/main/t", "t/main/t/1"):
            refused = self.client.http.get(f"/api/v1/{path}", headers=headers)
            assert refused.status_code == 404, refused.text
            yield refused.json()["hint"]
        with calling(self.client, ("x-api-key", self.tokens[name])) as caller:
            for path, fields in ((f"{KV}/Get", {"key": b"k"}), (f"{SUBSCRIPTIONS}/Subscribe", {})):
                trailers: Any = caller.refusal(path, **fields)
                yield dict(trailers.trailing_metadata())["headwater-hint"]
        gateway = GatewayClient(self.url, headers=headers)
        yield gateway.error("sql", {"query": "SELECT 1"})["details"]["hint"]
        gateway.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = Path(tmp_path_factory.mktemp("missing"))
    databases = tuple(DatabaseConfig(name, str(folder / f"{name}.sqlite")) for name in ("app", "hidden"))
    with (
        Whole(folder / "data", databases=databases) as files,
        serving(files, folder=folder, token=Secret(ADMIN)) as client,
    ):
        yield World(client)


@pytest.mark.parametrize(
    ("name", "said"),
    [("admin", "There are: app, hidden."), ("held", "There are: app."), ("nowhere", "There are: none.")],
)
def test_hint_on_a_missing_database_names_those_that_the_caller_may_see(world: World, name: str, said: str) -> None:
    for hint in world.hints(name):
        assert hint.startswith(said), hint


def test_hint_on_an_unknown_database_says_how_to_select_one(world: World) -> None:
    assert WAY in world.client.error("sql.exec", sql="SELECT 1")["details"]["hint"]
    near = world.client.error("sql.exec", sql="SELECT 1", db="hiden")["details"]["hint"]
    assert near.startswith("Did you mean 'hidden'?") and WAY in near


def test_statement_of_a_viewer_is_refused_with_alternatives(world: World) -> None:
    made = world.client.ok("security.token.create", name="v", role="viewer", scopes=["app"])
    headers = {"x-api-key": made["token"]}
    body = {"sql": "SELECT 1", "db": "app"}
    said = world.client.http.post("/api/v1/sql/exec", json=body, headers=headers).json()["error"]["details"]["hint"]
    gateway = GatewayClient(world.url, headers=headers)
    assert gateway.error("sql", {"query": "SELECT 1", "namespace": "app"})["details"]["hint"] == said
    gateway.close()
    named = [word.strip(",.") for word in said.split() if "." in word.strip(".")]
    assert named == ["query.select", "query.prepare", "data.get"]
    other = world.client.http.post(
        "/api/v1/rpc", json={"id": 1, "method": "security.token.list"}, headers=headers
    ).json()
    assert other["error"]["details"]["hint"] == "Ask for another role."
