"""Every example of the documentation runs, and is answered as the page shows."""

import asyncio
import json
import re
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from tests.doc_pages import BLOCK, EXAMPLE_PAGES, blocks, page
from tests.suite.deadlines import PATIENCE
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from headwater.app import App
from headwater.config import Config, LogConfig, ServeConfig
from headwater.serve.api import Api
from headwater.serve.rpc.methods import METHODS
from headwater.serve.server.server import Server

CHANGING = {
    "time_unix_ms",
    "version",
    "latest_offset",
    "retained_events",
    "log_bytes",
    "lag_changes",
    "lag_seconds",
    "capture_rows",
    "writes",
    "latest",
    "commit_ts_ms",
    "timestamp_us",
    "ts",
    "bytes",
    "created_at_ms",
    "created_ms",
    "expires_at_ms",
}
SOMETIMES = {"will_expire_at_ms"}  # depends on how fast the test itself is


@contextmanager
def served(folder: Path, retention: int | None = None) -> Iterator[httpx.Client]:
    """Run a whole server in a thread; yield a client."""
    config = Config(data=str(folder))
    app = App(config if retention is None else replace(config, log=LogConfig(retention_events=retention)))
    app.start()
    server = Server(ServeConfig(http="127.0.0.1:0"), Api.over(app), app.open_feeds, folder)
    started = threading.Event()
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        stop = asyncio.Event()
        await server.start()
        stops.append((asyncio.get_running_loop(), stop))
        started.set()
        await stop.wait()
        await server.stop()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert started.wait(PATIENCE)
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            yield client
    finally:
        for loop, stop in stops:
            loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE)
        app.close()


class Remembered:
    """Fills in what only a running server knows: the newest transaction and the newest tag."""

    def __init__(self) -> None:
        self.tx = self.tag = self.etag = self.key = ""

    def note(self, result: Any) -> None:
        if isinstance(result, dict):
            self.tx, self.tag = result.get("tx", self.tx), result.get("etag", self.tag)
            self.key = result["id"] if "token" in result else self.key

    def fill(self, value: Any) -> Any:
        match value:
            case dict():
                return {name: self.fill(inner) for name, inner in value.items()}
            case list():
                return [self.fill(inner) for inner in value]
            case "tx_…":
                return self.tx
            case '"row:…"':
                return self.tag
            case "abcdefghijkl":
                return self.key
            case _:
                return value


def same(shown: Any, real: Any, where: str = "answer") -> None:
    """Check that `shown` in a page is the real answer; `…` matches anything, and varying numbers are not compared."""
    match shown:
        case dict():
            assert list(shown) == [name for name in real if name in shown or name not in SOMETIMES], where
            for name, inner in shown.items():
                if name in CHANGING:
                    assert isinstance(real[name], type(inner)), f"{where}.{name}"
                else:
                    same(inner, real[name], f"{where}.{name}")
        case [*items, "…"]:
            assert items == real[: len(items)], where
        case list():
            assert len(shown) == len(real), where
            for place, inner in enumerate(shown):
                same(inner, real[place], f"{where}[{place}]")
        case str() if "…" in shown:
            head, tail = shown.split("…")
            assert real.startswith(head) and real.endswith(tail), where
        case _:
            assert (type(shown), shown) == (type(real), real), where


# --- pages, from top to bottom ---------------------------------------------------------------------------


def test_every_method_has_an_example_request() -> None:
    text = "\n".join(map(page, EXAMPLE_PAGES))
    asked = {json.loads(body).get("method") for info, body in blocks(text, "json") if info.startswith("request")}
    assert asked >= set(METHODS)


@pytest.mark.parametrize("name", EXAMPLE_PAGES)
def test_examples_of_a_page_are_answered_as_shown(tmp_path: Path, name: str) -> None:
    remembered, answer, ran = Remembered(), None, 0
    with served(tmp_path) as client:
        for info, body in BLOCK.findall(page(name)):
            kind, _, path = info.partition(" ")
            match kind, path.split(" ")[0]:
                case "json", "request":
                    assert answer is None, f"no answer is shown before {body}"
                    path = path.removeprefix("request").strip() or "/api/v1/rpc"
                    answer = client.post(path, json=remembered.fill(json.loads(body))).json()
                    remembered.note(answer.get("result"))
                case "json", "get":
                    same(json.loads(body), client.get(path.removeprefix("get ")).json(), body[:60])
                case "json", "response":
                    same(json.loads(body), answer, body[:60])
                    answer = None
                case "sse", _:
                    compare(sse_frames(body.splitlines()), sse_frames(lines_of(client, path, "text/event-stream")))
                case "ndjson", _:
                    found = lines_of(client, path, "application/x-ndjson")
                    compare(map(json.loads, body.splitlines()), map(json.loads, filter(None, found)))
                case "websocket", _:
                    talk(client, path, body)
                case _:
                    continue
            ran += 1
    assert ran > 5 and answer is None


def compare(shown: Iterator[Any], real: Iterator[Any]) -> None:
    """Compare as many real events as are shown: most streams have no end."""
    for expected in shown:
        same(expected, next(real), str(expected)[:80])


def lines_of(client: httpx.Client, path: str, accept: str) -> Iterator[str]:
    with client.stream("GET", path, headers={"accept": accept}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == accept
        yield from response.iter_lines()


def sse_frames(lines: Iterator[str] | list[str]) -> Iterator[dict[str, Any]]:
    frame: dict[str, Any] = {}
    for line in [*lines, ""] if isinstance(lines, list) else lines:
        if line:
            name, value = line.split(": ", 1)
            frame[name] = json.loads(value) if name == "data" else value
        elif frame:
            yield frame
            frame = {}


def talk(client: httpx.Client, path: str, body: str) -> None:
    """Send the lines after `>`, compare answers with lines after `<`, and expect the close code of the last line."""
    with connect(f"ws://{client.base_url.netloc.decode()}{path}", compression=None) as socket:
        for line in body.splitlines():
            if line.startswith("> "):
                socket.send(line[2:])
            elif line.startswith("< "):
                same(json.loads(line[2:]), json.loads(socket.recv(timeout=PATIENCE)), line[:60])
            else:
                with pytest.raises(ConnectionClosed) as closed:
                    socket.recv(timeout=PATIENCE)
                assert closed.value.rcvd is not None
                assert line == f"closed with {closed.value.rcvd.code} and the reason {closed.value.rcvd.reason}"


# --- a reader that lost its place ------------------------------------------------------------------------


def shown_as(name: str, kind: str, info: str) -> str:
    (found,) = [body for other, body in blocks(page(name), kind) if other == info]
    return found


def test_reader_before_the_horizon_is_answered_as_documented_and_recovers(tmp_path: Path) -> None:
    with served(tmp_path, retention=4) as client:

        def call(method: str, **params: Any) -> Any:
            answer = client.post("/api/v1/rpc", json={"id": 1, "method": method, "params": params}).json()
            return answer.get("result") or answer["error"]

        call("sql.exec", sql="CREATE TABLE orders (id INTEGER PRIMARY KEY, total REAL)")
        id = call("cdc.subscribe_table", table="orders")["sub_id"]
        for total in range(9):
            call("sql.exec", sql="INSERT INTO orders(total) VALUES (?)", args=[total])
        lost = call("cdc.poll", sub_id=id)
        same(json.loads(shown_as("docs/subscriptions.md", "json", "lost poll")), lost)
        frames = list(sse_frames(lines_of(client, f"/api/v1/cdc/sse/{id}", "text/event-stream")))
        same(list(sse_frames(shown_as("docs/streams.md", "sse-lost", "").splitlines())), frames)
        snapshot = client.get(lost["snapshot_url"])
        assert snapshot.status_code == 200 and len(snapshot.text.splitlines()) == 9
        offset = int(snapshot.headers["x-headwater-offset"])
        assert call("cdc.seek", sub_id=id, offset=offset) == {"sub_id": id, "acked_offset": offset}
        assert not call("cdc.poll", sub_id=id)["resnapshot_required"]


# --- commands of the first pages -------------------------------------------------------------------------


def path_of(url: httpx.URL, words: list[str]) -> str:
    """Return the path and query that curl requests; with -G the data options go into the query."""
    given = [words[place + 1] for place, word in enumerate(words) if word in ("-d", "--data-urlencode")]
    pairs = [tuple(text.split("=", 1)) for text in given]
    return str(url.raw_path, "ascii") + (f"?{urlencode(pairs)}" if pairs else "")


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_requests_of_the_quickstart_succeed(tmp_path: Path, name: str) -> None:
    text = "\n".join(body for _, body in blocks(page(name), "sh"))
    lines = [line for line in text.splitlines() if line.startswith("curl")]
    assert lines
    remembered = Remembered()
    with served(tmp_path) as client:
        for place, line in enumerate(lines):
            words = shlex.split(line)
            url = httpx.URL(next(word for word in words if "://" in word))
            if "--json" not in words:
                accept = next((word[8:] for word in words if word.startswith("accept: ")), "text/event-stream")
                if {"-N", "-GN"} & set(words):
                    assert next(lines_of(client, path_of(url, words), accept))
                else:
                    held = {"if-none-match": remembered.etag} if any("If-None-Match" in word for word in words) else {}
                    answer = client.get(path_of(url, words), headers=held, follow_redirects=True)
                    assert answer.status_code == (304 if held else 200), answer.text
                    remembered.etag = answer.headers.get("etag", "")
                continue
            filled = json.loads(words[-1].replace("$TAG", json.dumps(remembered.tag)))
            answer = client.post(url.path, json=filled).json()
            if line in lines[:place] and "if_match" in line:  # the same conditional write again: its tag is old
                assert answer["error"]["code"] == "conflict", answer
            else:
                assert answer["ok"], answer
            if filled.get("method") == "data.get":
                remembered.note(answer["result"])


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/pipeline.md"])
def test_pipeline_example_of_a_page_uses_a_table_created_on_that_page(name: str) -> None:
    text = "\n".join(body for _, body in blocks(page(name), "sh"))
    before, found, after = text.partition("headwater pipeline init lake.toml --table ")
    assert found and after.split()[0] in re.findall(r"CREATE TABLE (\w+)", before)
    assert "headwater pipeline run lake.toml --once --verify" in after
