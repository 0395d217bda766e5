"""A server that keeps its port and its data over restarts, so that a browser finds it again."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import httpx
from tests.guarantees.server_process import ServerProcess
from tests.suite.deadlines import PATIENCE

# Below the ports that the system hands out by itself: nobody takes ours while the server is down.
PORTS = range(20_000, 30_000)
TABLE = "CREATE TABLE orders(id INTEGER PRIMARY KEY, status TEXT)"


class KeptServer(ServerProcess):
    """A server over one folder with a table `orders`, with a credential if `token` is given."""

    def __init__(self, folder: Path, settings: str = "", token: str = "") -> None:
        super().__init__(folder, settings + (f'\nserve.token = "{token}"\n' if token else ""))
        self._address = f"127.0.0.1:{_free_port()}"
        self._http = httpx.Client(headers={"authorization": f"Bearer {token}"} if token else {}, timeout=PATIENCE)
        self.token = token

    def launch(self) -> None:
        """Start without waiting, on the port of the first start."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
        command = [sys.executable, "-m", "headwater", "serve", "--config", str(self._config)]
        self._process = subprocess.Popen(
            [*command, "--data", str(self.folder), "--http", self._address, "--grpc", "off"],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def ask(self, method: str, **params: Any) -> Any:
        """Return the result of a call; fail if it is refused."""
        asked = {"id": 1, "method": method, "params": params}
        answer = self._http.post(f"{self.url}/api/v1/rpc", json=asked).json()
        assert answer["ok"], answer
        return answer["result"]

    def subscribe(self) -> str:
        """Create a subscription on `orders`; return its id."""
        found = self.ask("cdc.subscribe_table", table="orders", include={"after": True}, format="plain_json")
        return str(found["sub_id"])

    def insert(self, *ids: int) -> None:
        """Insert rows in one transaction through the server."""
        self.ask("sql.exec", sql=_insert(ids))

    def insert_meanwhile(self, *ids: int) -> None:
        """Insert rows in one transaction by another connection, also while the server is down."""
        database = apsw.Connection(str(self.folder / "main.db"))
        try:
            database.set_busy_timeout(10_000)
            database.execute(_insert(ids))
        finally:
            database.close()

    def sse(self, sub_id: str) -> str:
        return f"{self.url}/api/v1/cdc/sse/{sub_id}"

    def ws(self, sub_id: str) -> str:
        return f"{self.url.replace('http', 'ws', 1)}/api/v1/cdc/ws/{sub_id}"

    def stored_subscription(self, sub_id: str) -> dict[str, Any]:
        """Return the subscription as `cdc.list` shows it."""
        found = self.ask("cdc.list")["subscriptions"]
        return next(one for one in found if one["sub_id"] == sub_id)

    def refused(self, route: str) -> int:
        """Return how many requests for `route` were answered by 403."""
        return self._number(f'headwater_http_responses_total{{route="{route}",status="403"}}')

    def streams(self) -> int:
        """Return how many streams of server-sent events are open."""
        return self._number('headwater_streams{transport="sse"}')

    def _number(self, metric: str) -> int:
        lines = self._http.get(f"{self.url}/metrics").text.splitlines()
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(metric))

    def close(self) -> None:
        self._http.close()
        super().close()


def _insert(ids: tuple[int, ...]) -> str:
    return "INSERT INTO orders VALUES " + ", ".join(f"({id}, 'new')" for id in ids)


def _free_port() -> int:
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise AssertionError("no free port was found")
