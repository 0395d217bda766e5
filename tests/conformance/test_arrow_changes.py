"""Changes as Arrow over HTTP (B18): for readers that load a feed into frames."""

from __future__ import annotations

from typing import Any

import httpx
import pyarrow as pa
import pytest
from tests.conformance.live_server import Live
from tests.suite.deadlines import PATIENCE

ARROW = "application/vnd.apache.arrow.stream"


def rows(live: Live, table: str, query: str) -> list[dict[str, Any]]:
    """Return the rows of a bounded stream."""
    response = live.http.get(f"/api/v1/changes/main/{table}?{query}", headers={"accept": ARROW})
    assert (response.status_code, response.headers["content-type"]) == (200, ARROW)
    return list(pa.ipc.open_stream(response.content).read_all().to_pylist())


def latest(live: Live) -> int:
    sub = live.subscribe()  # unlike stats.snapshot it waits for the log
    live.ok("cdc.close", sub_id=sub["sub_id"])
    return int(sub["offset"])


def test_arrow_change_has_both_images_its_transaction_and_its_offset(server: Live, table: str) -> None:
    begin = latest(server)
    server.together(f"INSERT INTO {table} VALUES(1, 'new', 1.5)", f"UPDATE {table} SET total = 2 WHERE id = 1")
    server.sql(f"DELETE FROM {table}")
    found = rows(server, table, f"from_offset={begin}&upto={latest(server)}")
    assert [(row["_change_type"], row["id"], row["total"], row["_offset"]) for row in found] == [
        ("insert", 1, 1.5, begin + 1),
        ("update_preimage", 1, 1.5, begin + 2),
        ("update_postimage", 1, 2.0, begin + 2),
        ("delete", 1, 2.0, begin + 3),
    ]
    assert [row["_commit_version"] for row in found] == [begin + 2] * 3 + [begin + 3]
    assert len({row["_txn"] for row in found}) == 2


def test_where_filter_is_applied_to_arrow_changes(server: Live, table: str) -> None:
    begin = latest(server)
    server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1), (2, 'b', 20), (3, 'c', 30)")
    server.sql(f"UPDATE {table} SET total = 2 WHERE id = 3")
    found = rows(server, table, f"from_offset={begin}&upto={latest(server)}&where=total%20%3E%2010")
    assert [(row["_change_type"], row["id"]) for row in found] == [("insert", 2), ("insert", 3), ("delete", 3)]


def test_live_arrow_stream_delivers_each_commit_and_ends_cleanly_on_a_schema_change(server: Live, table: str) -> None:
    url = f"/api/v1/changes/main/{table}?from_offset={latest(server)}"
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
        client.stream("GET", url, headers={"accept": ARROW}) as body,
    ):
        server.sql(f"INSERT INTO {table} VALUES(1, 'a', 1)")
        reader = pa.ipc.open_stream(_File(body))
        assert reader.read_next_batch().to_pylist()[0]["id"] == 1
        server.sql(f"INSERT INTO {table} VALUES(2, 'b', 2)")
        assert reader.read_next_batch().to_pylist()[0]["id"] == 2
        server.sql(f"ALTER TABLE {table} ADD COLUMN more TEXT")
        server.sql(f"INSERT INTO {table} VALUES(3, 'c', 3, 'x')")
        with pytest.raises(StopIteration):
            reader.read_next_batch()


def test_arrow_request_for_snapshot_all_tables_or_future_offset_is_refused(server: Live, table: str) -> None:
    for path in (f"/api/v1/changes/main/{table}?start=snapshot", "/api/v1/changes/main"):
        response = server.http.get(path, headers={"accept": ARROW})
        assert (response.status_code, response.json()["code"]) == (400, "invalid_request")
    beyond = server.http.get(f"/api/v1/changes/main/{table}?from_offset=99999999", headers={"accept": ARROW})
    assert (beyond.status_code, beyond.json()["code"]) == (400, "invalid_request")


class _File:
    """A response body as a file for Arrow."""

    closed = False

    def __init__(self, body: httpx.Response) -> None:
        self._pieces, self._rest = body.iter_bytes(), b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size:
            piece = next(self._pieces, b"")
            if not piece:
                break
            self._rest += piece
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
