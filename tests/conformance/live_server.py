"""A whole Headwater in this process, to be stopped and restarted: databases, feeds and HTTP over one data folder."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.conformance.readers import SseReader, WsReader
from tests.suite.deadlines import PATIENCE, TRANSACTIONS, wait_until

from headwater.app import App
from headwater.config import Config, DatabaseConfig, FeedsConfig, LogConfig, ServeConfig
from headwater.feeds.feeds import Feeds
from headwater.serve.api import Api
from headwater.serve.server.server import Server, loop_factory
from headwater.sources.postgres.settings import PostgresConfig
from headwater.sources.sqlite.settings import SqliteConfig

CHECKPOINT_SECONDS = 3600.0  # none comes between the frames that a test expects


class Live:
    """A server that starts at once, with default settings, except that streams send no checkpoints while they run.

    `url` is where `main` is, if not embedded; `config` replaces all settings.
    """

    # Virtual tables first: they take the tables behind them with them.
    TABLES = """
SELECT upper(type), '"' || replace(name, '"', '""') || '"' FROM sqlite_schema
WHERE type IN ('table', 'view') AND substr(name, 1, 7) <> 'sqlite_' AND substr(name, 1, 11) <> '_headwater_'
ORDER BY sql LIKE 'CREATE VIRTUAL %' DESC
"""
    CASCADE = ""

    def __init__(
        self,
        data: Path,
        *,
        serve: dict[str, Any] | None = None,
        log: dict[str, Any] | None = None,
        feeds: dict[str, Any] | None = None,
        postgres: dict[str, Any] | None = None,
        url: str = "",
        config: Config | None = None,
    ) -> None:
        self.config = config or Config(
            data=str(data),
            serve=ServeConfig(**{"http": "127.0.0.1:0", "drain_seconds": 5.0} | (serve or {})),
            log=LogConfig(**(log or {})),
            feeds=FeedsConfig(**{"checkpoint_seconds": CHECKPOINT_SECONDS} | (feeds or {})),
            sources={
                "sqlite": SqliteConfig(**TRANSACTIONS),
                "postgres": PostgresConfig(**(postgres or {})),
            },
            databases=(DatabaseConfig("main", url),) if url else (),
        )
        self._thread: threading.Thread | None = None
        self._readers: list[SseReader | WsReader] = []
        self.headers: dict[str, str] = {}
        if self.config.serve.token is not None:
            self.headers["authorization"] = b"Bearer " + self.config.serve.token.encode()
        self.start()

    # --- life --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open everything and serve it on a free port."""
        self.app = App(self.config)
        self.api = Api.over(self.app)
        keys = None if self.config.serve.token is None else Path(self.config.data)
        self._server = Server(self.config.serve, self.api, self.app.open_feeds, keys)
        self.app.start()
        self._started, self._failure = threading.Event(), []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(PATIENCE)
        if self._failure:
            self._thread.join()
            raise self._failure[0]
        self.url = self._server.url
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, headers=self.headers)

    def _run(self) -> None:
        async def main() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await self._server.start()
            self._started.set()
            await self._stop.wait()
            await self._server.stop()

        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(main())
        except BaseException as error:  # shown by whoever started it
            self._failure.append(error)
        finally:
            self._started.set()

    def ask_to_stop(self) -> None:
        """Request a stop as SIGTERM does; `stop` waits for its end."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        """Stop as after SIGTERM, and close every reader that was opened here."""
        if self._thread is None:
            return
        self.ask_to_stop()
        self.leave()
        self.http.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server did not stop"
        self._thread = None
        self.app.close()
        if self._failure:
            raise self._failure[0]

    def remove(self) -> None:
        """Stop and remove what the server created outside of its folder."""
        self.stop()

    def drop_tables(self, before: list[list[Any]]) -> None:
        """Drop every table and view that was not there `before`, as `tables` listed them."""
        for kind, name in self.tables():
            if [kind, name] not in before:
                self.sql(f"DROP {kind} IF EXISTS {name}{self.CASCADE}")

    def tables(self) -> list[list[Any]]:
        """List the tables and views as pairs of TABLE or VIEW and the quoted name."""
        return self.sql(self.TABLES)

    def leave(self) -> None:
        """Close every reader that was opened here."""
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.close()

    def restart(self) -> None:
        """Stop, and start again on the same folder."""
        self.stop()
        self.start()

    # --- asking ------------------------------------------------------------------------------------------

    def rpc(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the envelope of the answer."""
        response = self.http.post("/api/v1/rpc", json={"id": 1, "method": method, "params": params})
        assert response.status_code == 200, response.text
        return response.json()

    def ok(self, method: str, **params: Any) -> Any:
        """Return the result of a call; fail if it is refused."""
        answer = self.rpc(method, **params)
        assert answer["ok"], answer
        return answer["result"]

    def error(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the error of a call; fail if it succeeds."""
        answer = self.rpc(method, **params)
        assert not answer["ok"], answer
        return answer["error"]

    def sql(self, statement: str, *args: Any, db: str = "main", **more: Any) -> list[list[Any]]:
        """Run one statement; return its rows as plain values."""
        data = self.ok("sql.exec", sql=statement, args=list(args), db=db, **more)["result"]["data"] or {"rows": []}
        return [[lit.get("v") for lit in row] for row in data["rows"]]

    def together(self, *statements: str) -> None:
        """Run statements in one transaction."""
        tx = self.ok("tx.begin")["tx"]
        for statement in statements:
            self.sql(statement, tx=tx)
        self.ok("tx.commit", tx=tx)

    def subscribe(self, table: str | None = None, **params: Any) -> dict[str, Any]:
        """Create a subscription, in plain JSON unless `params` say otherwise."""
        named = {} if table is None else {"table": table}
        return self.ok("cdc.subscribe_table", **{"format": "plain_json"} | named | params)

    def poll(self, sub: dict[str, Any], **params: Any) -> dict[str, Any]:
        """Return one page."""
        return self.ok("cdc.poll", sub_id=sub["sub_id"], **params)

    def changes(self, sub: dict[str, Any], **params: Any) -> list[dict[str, Any]]:
        """Return the changes of one page."""
        return self.poll(sub, **params)["events"]

    def whole(self, sub: dict[str, Any]) -> dict[str, Any]:
        """Poll until a page is caught up; return that page. A busy log may take longer than one poll waits."""
        pages: list[dict[str, Any]] = []
        self.until(lambda: pages.append(self.poll(sub)) or pages[-1]["caught_up"])  # type: ignore[func-returns-value]
        return pages[-1]

    def caught_up(self, sub: dict[str, Any]) -> int:
        """Return the offset after everything committed before."""
        return int(self.whole(sub)["next_offset"])

    # --- streams -----------------------------------------------------------------------------------------

    def get(self, path: str, **headers: str) -> SseReader:
        """Open a stream over HTTP by its path."""
        given = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return self._kept(SseReader(self.url, path, given))

    def sse(self, sub: dict[str, Any], query: str = "", **headers: str) -> SseReader:
        """Open the server-sent events of a subscription."""
        return self.get(sub["sse_url"] + query, **headers)

    def ws(self, sub: dict[str, Any], query: str = "", **headers: str) -> WsReader:
        """Open the WebSocket of a subscription."""
        given = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return self._kept(WsReader(self.url, sub["ws_url"] + query, given))

    def stream(self, transport: str, sub: dict[str, Any], query: str = "", **headers: str) -> SseReader | WsReader:
        """Open the server-sent events or the WebSocket of a subscription."""
        return self.sse(sub, query, **headers) if transport == "sse" else self.ws(sub, query, **headers)

    def _kept(self, reader: Any) -> Any:
        self._readers.append(reader)
        return reader

    # --- looking in --------------------------------------------------------------------------------------

    @property
    def feeds(self) -> Feeds:
        """Return the feeds of the running server."""
        return self.api.feeding()

    def metric(self, name: str, **labels: str) -> float:
        """Return one number of /metrics; 0 if it is absent."""
        text = self.http.get("/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds` returns True."""
        wait_until(holds)
