"""SochDB's own client from PyPI, unchanged, in a separate environment, against a real server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.doc_pages import blocks, page
from tests.guarantees.server_process import ServerProcess

from headwater.model.keys.key import encode_key

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sochdb" / "bin" / "python"
MISSING = "SochDB's own client is not here: make sochdb"
KEY = "key-of-the-test"
SETTINGS = f'serve.token = "{KEY}"\nlog.retention_events = 100\n'
INSERT, UPDATE, DELETE, SCHEMA_CHANGE = 1, 2, 3, 4


@pytest.fixture(scope="module")
def python() -> str:
    """Return the Python that has the client; skip the test if it is missing, and fail on CI."""
    if not PYTHON.exists():
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    return str(PYTHON)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    made = ServerProcess(tmp_path_factory.mktemp("sochdb"), SETTINGS)
    try:
        made.start()
        yield made
        made.stop()
    finally:
        made.close()


@pytest.fixture(scope="module")
def script_results(python: str, server: ServerProcess) -> dict[str, Any]:
    """Run the script against the server; return its results, parsed from the JSON that it prints."""
    for sql in (
        "CREATE TABLE orders(id INTEGER PRIMARY KEY, total)",
        "INSERT INTO orders VALUES (1, 10), (2, 20), (3, NULL)",
    ):
        answer = httpx.post(
            f"{server.url}/api/v1/rpc",
            json={"id": 1, "method": "sql.exec", "params": {"sql": sql}},
            headers={"x-api-key": KEY},
        )
        assert answer.json()["ok"], answer.text
    command = [python, "-I", str(Path(__file__).with_name("sochdb_script.py")), server.grpc, KEY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_sochdb_client_receives_the_rows_of_a_table_from_an_offset(script_results: dict[str, Any]) -> None:
    found = script_results["rows"]
    assert [event["sequence"] for event in found] == [2, 3, 4]
    assert [json.loads(event["after_value"]) for event in found] == [
        {"id": 1, "total": 10},
        {"id": 2, "total": 20},
        {"id": 3, "total": None},
    ]
    assert [event["key"] for event in found] == [encode_key((number,)).decode("latin-1") for number in (1, 2, 3)]
    assert {event["operation"] for event in found} == {INSERT} and {event["table"] for event in found} == {"orders"}
    assert len({event["txn_id"] for event in found}) == 1


def test_sochdb_client_receives_only_changes_that_match_its_predicate(script_results: dict[str, Any]) -> None:
    assert script_results["predicate"]["sequence"] == 4


def test_sochdb_client_receives_keys_and_values_in_their_written_form(script_results: dict[str, Any]) -> None:
    created, *events = script_results["pairs"]["events"]
    assert created["operation"] == SCHEMA_CHANGE and created["ddl"].startswith("CREATE TABLE") and not created["key"]
    assert [(each["operation"], each["key"], each["before_value"], each["after_value"]) for each in events] == [
        (INSERT, "user:ÿ", "", "one"),
        (INSERT, "other", "", "x"),
        (UPDATE, "user:ÿ", "one", "two"),
        (DELETE, "user:ÿ", "two", ""),
    ]
    watched = script_results["pairs"]["watched"]
    assert [(each["operation"], each["before_value"], each["after_value"]) for each in watched] == [
        (INSERT, "", "one"),
        (UPDATE, "one", "two"),
        (DELETE, "two", ""),
    ]
    assert [each["sequence"] for each in watched] == [events[place]["sequence"] for place in (0, 2, 3)]


def test_sochdb_client_puts_gets_scans_and_deletes_keys(script_results: dict[str, Any]) -> None:
    found = script_results["store"]
    assert found["put"] == {"success": True, "error": ""}
    assert found["get"] == {"value": "\0ÿ", "found": True, "error": ""}
    assert found["absent"] == {"value": "", "found": False, "error": ""}
    assert found["batch"] == {"success_count": 2, "error": ""}
    assert found["scan"] == [{"key": "s:1", "value": "v1"}, {"key": "s:2", "value": "v2"}]
    assert found["many"] == [
        {"key": "s:2", "value": "v2", "found": True},
        {"key": "no", "value": "", "found": False},
    ]
    assert [each["success"] for each in found["deleted"]] == [True, False]
    assert found["namespace"]["code"] == "NOT_FOUND"


def test_open_sochdb_subscription_is_listed_and_cancelled(script_results: dict[str, Any]) -> None:
    found = script_results["listing"]
    assert found["before"] == found["after"] == []
    during = found["during"]
    assert during["subscription_id"].startswith("sub-") and during["namespace"] == "default"
    assert (during["tables"], during["start_sequence"]) == (["orders"], 3)
    id = during["subscription_id"]
    assert found["cancelled"] == [
        {"success": True, "error": ""},
        {"success": False, "error": f"Subscription '{id}' not found"},
    ]
    assert found["code"] == "OK" and found["rest"] <= 2


def test_sochdb_overrun_is_reported_as_out_of_range_with_the_oldest_sequence(script_results: dict[str, Any]) -> None:
    found = script_results["overrun"]
    oldest = found["trailers"]["oldest-available"]
    assert found["code"] == "OUT_OF_RANGE" and int(oldest) > 1
    assert found["details"] == f"CDC overrun: requested seq 1 but oldest available is {oldest}"


def test_sochdb_calls_without_a_valid_key_are_refused(script_results: dict[str, Any]) -> None:
    found = script_results["doors"]
    for name in ("kv", "stream", "wrong"):
        assert found[name]["code"] == "UNAUTHENTICATED"
        assert found[name]["details"] == "Authentication required. Provide a Bearer token or API key."
    assert found["by x-api-key"] == []


def test_grpc_example_of_the_docs_prints_its_output(python: str, tmp_path: Path) -> None:
    ((_, example),) = blocks(page("docs/grpc-api.md"), "python")
    server = ServerProcess(tmp_path)
    try:
        server.start()
        script = example.replace("127.0.0.1:7172", server.grpc)
        assert script != example
        done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, timeout=120)
        server.stop()
    finally:
        server.close()
    assert (done.returncode, done.stdout) == (0, "1 b'' b''\n2 b'user:1' b'Ada'\n"), done.stderr
