"""Rows and changes in bulk from a real server, by both clients: also during writes, splits and kills of the worker."""

import json
import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.client.both_clients import ask_sync
from tests.conformance.live_server import Live

from headwater.client import AsyncClient, Client, Described
from headwater.errors import Conflict, InvalidRequest, NotFound, OffsetExpired
from headwater.model.keys.key import Span, encode_key

MANY = 60_000
_numbers = count(1)
FILL = f"""
    WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {MANY})
    INSERT INTO t SELECT i, printf('%300d', i) FROM n
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Yield a server with a table `t` that is larger than the socket buffers."""
    live = Live(tmp_path_factory.mktemp("large"))
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT)")
    live.sql(FILL)
    with Client(live.url) as client:  # a busy machine takes longer to log it than one question waits for
        live.until(lambda: client.describe("main", "t").latest > MANY)
    yield live
    live.stop()


class Small:
    """A table of three rows on the same server."""

    def __init__(self, live: Live) -> None:
        self.live, self.url, self.name = live, live.url, f"s{next(_numbers)}"
        self.sql("CREATE TABLE $ (id INTEGER PRIMARY KEY, name TEXT)")
        self.sql("INSERT INTO $ VALUES (1, 'a'), (2, 'b'), (3, 'c')")

    def sql(self, statement: str) -> None:
        self.live.sql(statement.replace("$", self.name))

    def description(self, after: int | None = None) -> Described:
        """Return the description of the table, once there is a change after `after`."""
        with Client(self.url) as client:
            return client.describe("main", self.name, after=after, wait_ms=60_000 if after else 0)


@pytest.fixture
def small(large: Live) -> Small:
    return Small(large)


def column(batches: list[pa.RecordBatch], name: str) -> list[Any]:
    return [value for batch in batches for value in batch.column(name).to_pylist()]


def key(*values: Any) -> bytes:
    return encode_key(values)


def kill_worker(live: Live) -> int:
    """Kill the bulk worker process of the server; return its pid."""
    pulls = live._server._pulls
    assert pulls is not None and pulls._worker.pid is not None
    os.kill(pulls._worker.pid, signal.SIGKILL)
    return pulls._worker.pid


class Read:
    """Reads the rows of the large table, and calls `act` after the first batch."""

    def __init__(self, act: Any, ranges: Any = ()) -> None:
        self._act, self._ranges, self.ids = act, ranges, []

    def _take(self, batch: pa.RecordBatch) -> None:
        if not self.ids:
            self._act()
        self.ids += batch.column("id").to_pylist()

    def sync(self, client: Client) -> None:
        for batch in client.snapshot("main", "t", ranges=self._ranges):
            self._take(batch)

    async def aio(self, client: AsyncClient) -> None:
        async for batch in client.snapshot("main", "t", ranges=self._ranges):
            self._take(batch)

    def by(self, ask: Any, live: Live) -> list[int]:
        ask(live.url, self.sync if ask is ask_sync else self.aio)
        return self.ids


# --- rows ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_snapshot_over_a_killed_worker_neither_loses_nor_repeats_rows(large: Live, ask: Any) -> None:
    killed: list[int] = []
    assert Read(lambda: killed.append(kill_worker(large))).by(ask, large) == list(range(1, MANY + 1))
    assert large._server._pulls is not None and large._server._pulls._worker.pid not in killed


@pytest.mark.slow
def test_ranges_split_and_merged_during_a_read_deliver_every_row_once(large: Live, ask: Any) -> None:
    with Client(large.url) as client:
        known = client.ranges("main", "t", 4 << 20)
        assert len(known) > 2

        def cut() -> None:
            now = client.ranges("main", "t")
            pair = [{"id": one.id, "epoch": one.epoch} for one in now[-2:]]
            client.call("pull.merge", table="t", ranges=pair)
            client.call("pull.split", table="t", range=now[0].id, epoch=now[0].epoch)
            kill_worker(large)  # in the midst of the range that was split

        assert Read(cut, known).by(ask, large) == list(range(1, MANY + 1))


def test_snapshot_of_an_older_version_ignores_later_writes(small: Small, ask: Any) -> None:
    version = small.description().version
    small.sql("UPDATE $ SET name = 'x'")
    small.sql("DELETE FROM $ WHERE id = 2")
    old = ask(small.url, lambda client: client.snapshot("main", small.name, version=version))
    new = ask(small.url, lambda client: client.snapshot("main", small.name))
    assert column(old, "name") == ["a", "b", "c"]
    assert column(new, "name") == ["x", "x"]


def test_snapshot_rows_are_selected_by_span_condition_and_column(small: Small, ask: Any) -> None:
    span = Span(key(2), key(3))
    assert column(ask(small.url, lambda c: c.snapshot("main", small.name, span=span)), "id") == [2]
    found = ask(small.url, lambda c: c.snapshot("main", small.name, where="name <> 'b'", columns=["id"]))
    assert column(found, "id") == [1, 3]
    assert "name" not in found[0].schema.names
    (none,) = ask(small.url, lambda c: c.snapshot("main", small.name, where="id > 5"))
    assert none.num_rows == 0 and "name" in none.schema.names


def test_span_that_cuts_ranges_delivers_exactly_its_rows(large: Live, ask: Any) -> None:
    with Client(large.url) as client:
        ranges = client.ranges("main", "t", 4 << 20)
    span = Span(key(7), key(MANY - 7))
    assert column(ask(large.url, lambda c: c.snapshot("main", "t", span=span, ranges=ranges)), "id") == [
        *range(7, MANY - 7)
    ]


# --- changes ---------------------------------------------------------------------------------------------


def test_log_slice_delivers_both_images_of_an_update(small: Small, ask: Any) -> None:
    before = small.description()
    small.sql("UPDATE $ SET name = 'x' WHERE id = 1")
    small.sql("DELETE FROM $ WHERE id = 3")
    seen = small.description(after=before.latest + 1)
    bounds = {"generation": seen.generation, "after": before.latest, "upto": seen.latest}
    found = ask(small.url, lambda c: c.log("main", small.name, **bounds))
    shown = zip(column(found, "_change_type"), column(found, "name"), strict=True)
    assert list(shown) == [("update_preimage", "a"), ("update_postimage", "x"), ("delete", "c")]
    span = Span(key(3), None)
    assert column(ask(small.url, lambda c: c.log("main", small.name, **bounds, span=span)), "name") == ["c"]
    assert column(ask(small.url, lambda c: c.log("main", small.name, **bounds, where="name = 'x'")), "name") == ["x"]


def test_log_slice_over_a_killed_worker_is_delivered_completely(large: Live, ask: Any) -> None:
    with Client(large.url) as client:
        seen = client.describe("main", "t")
    offsets: list[int] = []

    def take(batch: pa.RecordBatch) -> None:
        if not offsets:
            kill_worker(large)
        offsets.extend(batch.column("_offset").to_pylist())

    bounds = {"generation": seen.generation, "after": 1, "upto": MANY + 1}

    def read(client: Client) -> None:
        for batch in client.log("main", "t", **bounds):
            take(batch)

    async def read_async(client: AsyncClient) -> None:
        async for batch in client.log("main", "t", **bounds):
            take(batch)

    ask(large.url, read if ask is ask_sync else read_async)
    assert offsets == list(range(2, MANY + 2))


def test_changes_of_several_tables_are_delivered_as_json(small: Small, ask: Any) -> None:
    before, other = small.description(), Small(small.live)
    small.sql("DELETE FROM $ WHERE id = 1")
    seen = small.description(after=before.latest + 4)
    bounds = {"generation": seen.generation, "after": before.latest, "upto": seen.latest}
    for tables in ([], [small.name, other.name]):
        found = ask(small.url, lambda c, tables=tables: c.log_tables("main", tables, **bounds))
        told = zip(column(found, "_table"), column(found, "_change_type"), strict=True)
        assert [one for one in told if one[1] != "schema_change"] == [(other.name, "insert")] * 3 + [
            (small.name, "delete")
        ]
    only = ask(small.url, lambda c: c.log_tables("main", [small.name], **bounds))
    assert [json.loads(text) for text in column(only, "before")] == [{"id": 1, "name": "a"}]


# --- leases, and what is refused -------------------------------------------------------------------------


def test_registered_version_stays_readable(small: Small, ask: Any) -> None:
    registered = ask(small.url, lambda c: c.register("main", small.name, "copy"))
    assert registered.version == small.description().latest and registered.lease_seconds > 0
    small.sql("DELETE FROM $")
    found = ask(small.url, lambda c: c.snapshot("main", small.name, version=registered.snapshot_version))
    assert column(found, "id") == [1, 2, 3]
    again = ask(small.url, lambda c: c.register("main", small.name, "copy", keep=registered.version))
    assert again.version > registered.version
    ask(small.url, lambda c: c.release("main", small.name, "copy"))


def test_unreadable_table_version_or_slice_is_refused_with_its_reason(small: Small, ask: Any) -> None:
    seen = small.description()
    with pytest.raises(NotFound):
        ask(small.url, lambda c: c.snapshot("main", "nowhere", version=seen.version))
    with pytest.raises(OffsetExpired) as lost:
        ask(small.url, lambda c: c.snapshot("main", small.name, version="0123456789abcdef.1"))
    assert lost.value.extra["resnapshot_reason"] == "log_generation_changed"
    assert lost.value.latest == seen.latest
    with pytest.raises(InvalidRequest, match="not in the log yet"):
        ask(small.url, lambda c: c.log("main", small.name, generation=seen.generation, after=seen.latest, upto=9**9))
    small.sql("ALTER TABLE $ ADD COLUMN colour TEXT")
    with pytest.raises(Conflict) as changed:
        ask(small.url, lambda c: c.snapshot("main", small.name, version=seen.version))
    assert changed.value.extra["resnapshot_reason"] == "schema_changed"


def test_expired_changes_are_refused(tmp_path: Path, ask: Any) -> None:
    short = Live(tmp_path / "short", log={"retention_events": 4})
    try:
        short.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT)")
        for id in range(9):
            short.sql("INSERT INTO t VALUES (?, 'x')", id)
        with Client(short.url) as client:
            seen = client.describe("main", "t", after=9, wait_ms=60_000)
        short.until(lambda: short.ok("stats.snapshot")["cdc"]["earliest_offset"] == 7)
        with pytest.raises(OffsetExpired) as lost:
            ask(short.url, lambda c: c.log("main", "t", generation=seen.generation, after=2, upto=9))
        assert lost.value.extra["resnapshot_reason"] == "wal_horizon_exceeded"
        assert lost.value.horizon == 7
    finally:
        short.stop()


def test_describe_reports_the_offset_of_a_schema_change(small: Small, ask: Any) -> None:
    seen = small.description()
    small.sql("ALTER TABLE $ ADD COLUMN colour TEXT")
    told = ask(
        small.url, lambda c: c.describe("main", small.name, after=seen.latest, wait_ms=60_000, shape=seen.table.version)
    )
    assert told.schema_changed_at == seen.latest + 1
    assert told.table.version > seen.table.version
    assert [one.name for one in told.table.visible] == ["id", "name", "colour"]
