"""One caller may open only a share of the bulk pulls and snapshots."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import Client, serving, unread
from tests.suite.deadlines import wait_until

from headwater.config import Secret
from headwater.serve.http.handlers import pulls, table_snapshots

pytestmark = pytest.mark.slow

GROW = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300) "
    "INSERT INTO t(v) SELECT printf('%.50000c', 'x') FROM n"
)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """A server with a table that is larger than all buffers between."""
    with Whole(tmp_path) as databases, serving(databases, folder=tmp_path, token=Secret("admin")) as client:
        client.http.headers["authorization"] = "Bearer admin"
        client.rows("CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
        client.rows(GROW)
        yield client


@pytest.mark.parametrize(("room", "path"), [(pulls, "pull/main/t/snapshot"), (table_snapshots, "snapshot/main/t")])
def test_caller_with_its_share_is_refused_and_others_are_not(
    client: Client, room: ModuleType, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "AT_ONCE", 4)
    monkeypatch.setattr(room, "SHARE", 2)
    ada, bob = (client.ok("security.token.create", name=name, role="viewer")["token"] for name in ("ada", "bob"))
    path = f"/api/v1/{path}?version={client.ok('pull.describe', table='t')['version']}"

    server: Any = client.server
    shares = (server._pulls if room is pulls else server._snapshots)._shares

    def wait_for_open(number: int) -> None:
        wait_until(lambda: shares._open.total == number, "those that are over were counted out")

    def status(token: str) -> int:
        found = client.http.head(path, headers={"authorization": f"Bearer {token}"}).status_code
        wait_for_open(2)
        return found

    request = f"GET {path} HTTP/1.1\r\n\r\n"
    with unread(client, request, ada), unread(client, request, ada):
        assert (status(ada), status(bob), status("admin")) == (429, 200, 200)
        with unread(client, request, "admin"), unread(client, request, "admin"):
            refused = client.http.head(path)
            assert refused.status_code == 429  # all are open
        wait_for_open(2)
        assert status(bob) == 200


def test_snapshot_that_reads_the_log_lets_other_snapshots_go_first(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = client.ok("pull.describe", table="t")["version"]
    client.rows("UPDATE t SET v = 'y'")  # 300 changes to undo
    server: Any = client.server
    places, holders = server._snapshots._places, list[Any]()
    yield_turn = places.yield_turn

    def noted(whose: Any) -> None:
        holders.append(whose)
        yield_turn(whose)

    monkeypatch.setattr(places, "yield_turn", noted)
    answer = client.http.get(f"/api/v1/snapshot/main/t?version={version}")
    assert answer.status_code == 200 and len(answer.text.splitlines()) == 300 and '"y"' not in answer.text
    assert len(holders) >= 2 and set(holders) == {("main", holders[0][1])} and holders[0][1]
