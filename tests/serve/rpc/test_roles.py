"""Which role each method needs: every method against every role."""

import asyncio
import json

import pytest
from tests.serve.server_fixture import NoDatabases

from headwater.config import ServeConfig
from headwater.model.principal import Principal
from headwater.serve.api import Api
from headwater.serve.limits.limits import Limits
from headwater.serve.limits.stream_limits import StreamCounts
from headwater.serve.metrics.metrics import Metrics
from headwater.serve.rpc.envelope import Rpc
from headwater.serve.rpc.methods import METHODS
from headwater.serve.thread_bridge import Bridge

WRITER = {"data.insert", "data.update", "data.delete", "sql.exec"}
OWNER = {
    "schema.create_database",
    "schema.drop_database",
    "schema.create_table",
    "schema.drop_table",
    "pull.split",
    "pull.merge",
    "security.token.create",
    "security.token.list",
    "security.token.revoke",
}


def code(role: str, method: str) -> str:
    bridge = Bridge(threads=1)
    api = Api.over(NoDatabases())
    rpc = Rpc(api, bridge, Metrics(dict), Limits(ServeConfig(), api, StreamCounts(1)))
    body = json.dumps({"id": 1, "method": method, "params": {"unknown": 1}}).encode()
    try:
        _, reply = asyncio.run(rpc.envelope(Principal("somebody", role), body, "somewhere"))
    finally:
        bridge.close()
    return str(json.loads(reply)["error"]["code"])


@pytest.mark.parametrize("method", sorted(METHODS))
def test_rpc_method_is_allowed_to_its_role_and_higher_and_forbidden_below(method: str) -> None:
    needed = "owner" if method in OWNER else "editor" if method in WRITER else "viewer"
    ranks = ["nobody", "viewer", "editor", "owner"]
    for role in ranks:
        wanted = "invalid_request" if ranks.index(role) >= ranks.index(needed) else "forbidden"
        assert code(role, method) == wanted, role
