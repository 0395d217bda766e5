"""A fake server for the data source: it answers pulls of changes in memory that the test sets."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pyarrow as pa

from headwater.model import arrow
from headwater.model.change import Change, Op, Transaction
from headwater.model.table import Column, Row, Table

TABLE = Table("t", (Column("id", "i64"), Column("name", "str"), Column("big", "u64")), ("id",))


class Twin:
    """One table whose log is a list: offset n is `log[n - 1]`, None for a change of another table."""

    def __init__(self, table: Table = TABLE) -> None:
        self.table, self.shapes = table, {table.version: table}
        self.generation, self.horizon, self.missing = "g1", 1, 0
        self.log: list[Change | None] = []
        self.asked: list[dict[str, Any]] = []  # parameters of pull.describe
        self.connections = 0
        twin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                twin.connections += 1

            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.answer(msgspec.json.encode({"id": 1, "ok": True, "result": twin.call(**body)}), "application/json")

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                self.answer(twin.bulk(url.path.rpartition("/")[2], query), "application/vnd.apache.arrow.stream")

            def answer(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # Writing

    def insert(self, *rows: Row) -> None:
        self.log += [Change(Op.INSERT, self.table, None, row) for row in rows]

    def update(self, before: Row, after: Row) -> None:
        self.log.append(Change(Op.UPDATE, self.table, before, after))

    def delete(self, row: Row) -> None:
        self.log.append(Change(Op.DELETE, self.table, row, None))

    def reshape(self, *columns: Column, resnapshot: bool = False) -> None:
        self.table = msgspec.structs.replace(self.table, columns=columns, version=self.table.version + 1)
        self.shapes[self.table.version] = self.table
        self.log.append(Change(Op.SCHEMA_CHANGE, self.table, resnapshot=resnapshot))

    @property
    def latest(self) -> int:
        return len(self.log) - self.missing

    # Answers

    def call(self, method: str, params: dict[str, Any], id: int) -> Any:
        if method == "pull.ranges":
            return {"ranges": [{"id": 1, "epoch": 1, "start": "", "rows": 0, "bytes": 0}]}
        assert method == "pull.describe", method
        self.asked.append(params)
        self.wait(params)
        told = {"generation": self.generation, "horizon": self.horizon, "latest": self.latest}
        told["table_latest"] = self.latest
        told |= {"db": "main", "table": self.table, "version": f"{self.generation}.{self.latest}"}
        if params.get("shape", self.table.version) != self.table.version and "after" in params:
            later = enumerate(self.log[params["after"] :], params["after"] + 1)
            found = [(at, c) for at, c in later if c is not None and c.op == Op.SCHEMA_CHANGE]
            told |= {"schema_changed_at": found[0][0], "resnapshot": found[0][1].resnapshot} if found else {}
        return told

    def wait(self, params: dict[str, Any]) -> None:
        deadline = time.monotonic() + params.get("wait_ms", 0) / 1000
        while "after" in params and self.latest <= params["after"] and time.monotonic() < deadline:
            time.sleep(0.01)

    def bulk(self, what: str, query: dict[str, str]) -> bytes:
        if what == "snapshot":
            upto = int(query["version"].rpartition(".")[2])
            rows: dict[Any, Row] = {}
            for change in filter(None, self.log[:upto]):
                for image, keep in ((change.before, False), (change.after, True)):
                    if image is not None:
                        rows.pop(change.table.key_of(image), None)
                        rows |= (
                            {change.table.key_of(image): self.fitted(change.table, self.table, image)} if keep else {}
                        )
            batch = arrow.rows_batch(self.table, list(rows.values()))
            return self.stream(batch, {"last_key": "ff"})
        shape = self.shapes[int(query.get("shape", self.table.version))]
        after, upto = int(query["after"]), int(query["upto"])
        assert query["generation"] == self.generation and self.horizon - 1 <= after <= upto <= self.latest
        delivered = []
        for offset, change in enumerate(self.log[after:upto], after + 1):
            if change is not None and change.op != Op.SCHEMA_CHANGE:
                images = [
                    None if i is None else self.fitted(change.table, shape, i) for i in (change.before, change.after)
                ]
                fitted = Change(change.op, shape, *images)
                part = Transaction(f"x{offset}", (fitted,), first=offset, commit_ts_ms=1_700_000_000_123)
                delivered.append((part, offset, fitted, change.op))
        return self.stream(arrow.changes_batch(shape, delivered), {"upto": str(upto)})

    def fitted(self, source: Table, target: Table, row: Row) -> Row:
        named = dict(zip(source.names, row, strict=True))
        return tuple(named.get(name) for name in target.names)

    def stream(self, batch: pa.RecordBatch, metadata: dict[str, str]) -> bytes:
        written = pa.BufferOutputStream()
        with pa.ipc.new_stream(written, batch.schema) as writer:
            writer.write_batch(batch, custom_metadata=metadata)
        return written.getvalue().to_pybytes()
