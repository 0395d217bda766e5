"""pull.* on the wire: the shapes a pipeline reads, and hostile parameters that are refused."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.queries.open_databases import Files, Whole
from tests.serve.server_fixture import Client, serving

from headwater.config import LogConfig, Secret
from headwater.model.keys.key import encode_key
from headwater.model.table import Table

ROWS = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000)"
    " INSERT INTO t SELECT i, zeroblob(100) FROM n"
)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Whole]:
    with Whole(tmp_path / "data", log=LogConfig(flush_ms=5)) as made:
        made.run("CREATE TABLE t(k INTEGER PRIMARY KEY, v)")
        made.run("CREATE TABLE loose(a TEXT)")
        made.run(ROWS)
        yield made


@pytest.fixture
def client(files: Whole) -> Iterator[Client]:
    with serving(files) as made:
        yield made


def test_described_table_has_its_key_and_column_types(client: Client, files: Whole) -> None:
    seen = client.ok("pull.describe", db="main", table="t")
    log = files.database("main").log
    assert set(seen) - {"closed_ts"} == {
        "db",
        "generation",
        "horizon",
        "latest",
        "table_latest",
        "caught_up",
        "version",
        "key",
        "table",
    }
    assert (seen["db"], seen["generation"], seen["latest"]) == ("main", log.generation, log.durable)
    assert seen["caught_up"] is True
    assert (seen["version"], seen["key"]) == (f"{log.generation}.{log.durable}", ["k"])
    assert msgspec.convert(seen["table"], Table) == files.get("main").describe()["t"]
    loose = client.ok("pull.describe", table="loose")
    assert loose["key"] == [] and loose["table"]["key"] == ["rowid"]


def test_describe_while_the_log_is_behind_has_caught_up_false(
    client: Client, files: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(files.database("main")), "catch_up", lambda self, timeout: False)
    assert client.ok("pull.describe", table="t")["caught_up"] is False
    error = client.error("pull.describe", table="late")  # perhaps created by a commit that the log does not have yet
    assert error["code"] == "unavailable"
    monkeypatch.undo()
    assert client.error("pull.describe", table="late")["code"] == "not_found"


def test_describe_after_an_offset_reports_where_the_shape_changed_and_the_new_shape(
    client: Client, files: Whole
) -> None:
    seen = client.ok("pull.describe", table="t")
    files.run("ALTER TABLE t ADD COLUMN w")
    later = client.ok("pull.describe", table="t", after=seen["latest"], shape=seen["table"]["version"])
    assert (later["schema_changed_at"], later["resnapshot"]) == (seen["latest"] + 1, False)
    assert later["changed_to"] == later["table"] != seen["table"]


def test_describe_with_wait_ms_returns_after_the_next_change(client: Client, files: Whole) -> None:
    seen = client.ok("pull.describe", table="t")
    log = files.database("main").log

    def write() -> None:
        while not log.has_listeners:
            time.sleep(0.001)
        files.run("DELETE FROM t WHERE k = 1")

    writer = threading.Thread(target=write)
    assert not log.has_listeners
    writer.start()
    later = client.ok("pull.describe", table="t", after=seen["latest"], wait_ms=20_000)
    writer.join()
    assert later["latest"] == seen["latest"] + 1


def test_changes_of_other_tables_leave_the_last_change_of_a_table(client: Client, files: Whole) -> None:
    before = client.ok("pull.describe", table="t")
    files.run("INSERT INTO loose DEFAULT VALUES")
    seen, other = (client.ok("pull.describe", table=name) for name in ("t", "loose"))
    assert (seen["table_latest"], seen["latest"]) == (before["table_latest"], before["latest"] + 1)
    assert other["table_latest"] == other["latest"] == seen["latest"]
    asked = {"t": seen["table_latest"], "loose": seen["table_latest"]}
    found = client.ok("pull.changed_tables", after=asked)
    log = files.database("main").log
    assert found == {
        "generation": log.generation,
        "horizon": log.horizon,
        "latest": other["latest"],
        "changed": {"loose": other["latest"]},
    }
    assert client.ok("pull.changed_tables", after={"t": seen["latest"], "unknown": 0})["changed"] == {}


def test_changed_tables_with_wait_ms_waits_for_a_change_of_the_named_table(client: Client, files: Whole) -> None:
    latest = client.ok("pull.describe", table="t")["latest"]
    log = files.database("main").log

    def write() -> None:
        for statement in ("INSERT INTO loose DEFAULT VALUES", "DELETE FROM t WHERE k = 1"):
            while not log.has_listeners:
                time.sleep(0.001)
            files.run(statement)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    found = client.ok("pull.changed_tables", after={"t": latest}, wait_ms=20_000)
    writer.join()
    assert found["changed"] == {"t": latest + 2}


def test_pull_ranges_returns_adjacent_ranges_with_bounds_in_hex(client: Client) -> None:
    found = client.ok("pull.ranges", table="t", target_bytes=60_000)
    first, *_, last = ranges = found["ranges"]
    assert len(ranges) == 4 and first["start"] == "" and "end" not in last
    assert [one["end"] for one in ranges[:-1]] == [one["start"] for one in ranges[1:]]
    assert sum(one["rows"] for one in ranges) == pytest.approx(2000, rel=0.1)
    assert client.ok("pull.ranges", table="t") == found


def test_register_or_merge_with_a_stale_epoch_returns_the_current_ranges(client: Client) -> None:
    (only,) = client.ok("pull.ranges", table="t", target_bytes=10**9)["ranges"]
    at = encode_key((7,)).hex()
    made = client.ok("pull.split", table="t", range=only["id"], epoch=1, at=at)["ranges"]
    assert [one.get("start") for one in made] == ["", at] and {one["epoch"] for one in made} == {2}
    error = client.error("pull.register", table="t", subscriber="s", range=only["id"], epoch=1)
    assert error["code"] == "stale_epoch" and error["details"]["ranges"] == made
    names = [{"id": one["id"], "epoch": one["epoch"]} for one in made]
    (whole,) = client.ok("pull.merge", table="t", ranges=names)["ranges"]
    assert whole["epoch"] == 3 and "end" not in whole
    error = client.error("pull.merge", table="t", ranges=names)
    assert error["code"] == "stale_epoch" and error["details"]["ranges"] == [whole]


def test_pull_register_returns_offset_and_lease_and_release_reports_changed_once(client: Client, files: Whole) -> None:
    found = client.ok("pull.register", table="t", subscriber="lake")
    log = files.database("main").log
    assert found == {
        "generation": log.generation,
        "init_snapshot_version": log.durable,
        "lease_seconds": 3600.0,
    }
    assert client.ok("pull.release", table="t", subscriber="lake") == {"ok": True, "changed": True}
    assert client.ok("pull.release", table="t", subscriber="lake") == {"ok": True, "changed": False}


@pytest.fixture
def keys(files: Whole, tmp_path: Path) -> Iterator[tuple[Client, dict[str, str]]]:
    """A server with a credential, as its owner sees it, and the keys of two viewers by name."""
    with serving(files, token=Secret("t"), folder=tmp_path) as made:
        made.http.headers["authorization"] = "Bearer t"
        yield made, {n: made.ok("security.token.create", name=n, role="viewer")["token"] for n in ("ann", "bob")}


@contextlib.contextmanager
def asking(client: Client, token: str) -> Iterator[Client]:
    """The client with another credential."""
    held = client.http.headers["authorization"]
    client.http.headers["authorization"] = f"Bearer {token}"
    yield client
    client.http.headers["authorization"] = held


def test_lease_of_an_owner_is_unknown_to_a_viewer(keys: tuple[Client, dict[str, str]]) -> None:
    client, tokens = keys
    client.ok("pull.register", table="t", subscriber="lake")
    with asking(client, tokens["ann"]):
        assert client.ok("pull.release", table="t", subscriber="lake") == {"ok": True, "changed": False}
        assert client.error("pull.register", table="t", subscriber="lake")["code"] == "conflict"
        client.ok("pull.register", table="t", subscriber="sea")
    with asking(client, tokens["bob"]):
        assert client.ok("pull.release", table="t", subscriber="sea") == {"ok": True, "changed": False}
    for name in ("lake", "sea"):
        assert client.ok("pull.release", table="t", subscriber=name) == {"ok": True, "changed": True}


def test_target_of_a_viewer_makes_no_range_of_others_stale(keys: tuple[Client, dict[str, str]]) -> None:
    client, tokens = keys
    found = client.ok("pull.ranges", table="t", target_bytes=60_000)
    with asking(client, tokens["ann"]):
        assert client.ok("pull.ranges", table="t", target_bytes=1) == found
        assert client.ok("pull.ranges", table="t", target_bytes=10**9) == found
        assert len(client.ok("pull.ranges", table="loose", target_bytes=1)["ranges"]) == 1
    first = found["ranges"][0]
    client.ok("pull.register", table="t", subscriber="s", range=first["id"], epoch=first["epoch"])


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("pull.describe", {"table": "t", "wait_ms": 60_001, "after": 0}, "invalid_request"),
    ("pull.describe", {"table": "t", "wait_ms": 1}, "invalid_request"),
    ("pull.describe", {"table": "t", "step_rows": 5}, "invalid_request"),
    ("pull.describe", {"table": "t", "after": 0, "step_rows": 0}, "invalid_request"),
    ("pull.describe", {"table": "t\0"}, "not_found"),
    ("pull.describe", {"table": "t", "after": 0, "shape": 2**63}, "invalid_request"),
    ("pull.describe", {"table": "t", "db": "../main"}, "not_found"),
    ("pull.changed_tables", {"after": {}}, "invalid_request"),
    ("pull.changed_tables", {"after": {"t": -1}}, "invalid_request"),
    ("pull.changed_tables", {"after": {"t": 0}, "db": "../main"}, "not_found"),
    ("pull.changed_tables", {"after": {"t": 0}, "wait_ms": 60_001}, "invalid_request"),
    ("pull.changed_tables", {"after": {f"t{n}": 0 for n in range(4097)}}, "invalid_request"),
    ("pull.ranges", {"table": "t", "target_bytes": 0}, "invalid_request"),
    ("pull.ranges", {"table": "T"}, "not_found"),
    ("pull.ranges", {"table": "_headwater_capture"}, "not_found"),
    ("pull.register", {"table": "t", "subscriber": "a\tb"}, "invalid_request"),
    ("pull.register", {"table": "t", "subscriber": "a", "range": 1}, "invalid_request"),
    ("pull.register", {"table": "t", "subscriber": "a", "range": 2**63 - 1, "epoch": 2**63 - 1}, "not_found"),
    ("pull.register", {"table": "t", "subscriber": "a", "keep": 2**62}, "invalid_request"),
    ("pull.release", {"table": "t", "subscriber": ""}, "invalid_request"),
    ("pull.split", {"table": "t", "range": 1, "epoch": 1, "at": "zz"}, "invalid_request"),
    ("pull.split", {"table": "t", "range": 1, "epoch": 1, "at": "00" * 5000}, "invalid_request"),
    ("pull.split", {"table": "t", "range": 0, "epoch": 0}, "not_found"),
    ("pull.merge", {"table": "t", "ranges": [{"id": 1, "epoch": 1}]}, "invalid_request"),
    ("pull.merge", {"table": "t", "ranges": [{"id": 1, "epoch": 1}] * 2}, "invalid_request"),
    ("pull.merge", {"table": "t", "ranges": [{"id": 1, "epoch": 1}] * 3}, "invalid_request"),
]


@pytest.mark.parametrize(("method", "params", "code"), HOSTILE)
def test_hostile_parameters_are_refused(client: Client, method: str, params: dict[str, Any], code: str) -> None:
    assert client.ok("pull.ranges", table="t")["ranges"][0]["id"] == 1
    assert client.error(method, **params)["code"] == code


def test_pull_ranges_with_a_target_of_one_byte_returns_1000_to_2000_ranges(client: Client) -> None:
    found = client.ok("pull.ranges", table="t", target_bytes=1)["ranges"]
    assert 1_000 <= len(found) <= 2_000


def test_pull_ranges_on_a_server_without_a_data_folder_is_unavailable(tmp_path: Path) -> None:
    with Files(tmp_path / "bare") as bare, serving(bare) as client:
        assert client.error("pull.ranges", table="t")["code"] == "unavailable"
