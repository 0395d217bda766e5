"""source and doctor: capture installed in a file, listed, checked and removed, without a server."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_process import query, refused, run, run_json, script, served

SCHEMA = "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT); CREATE TABLE odd (rowid, _rowid_, oid);"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    script(tmp_path / "app.db", SCHEMA)
    return tmp_path / "app.db"


def states(found: list[dict[str, Any]], subject: str = "main") -> dict[str, list[str]]:
    return {
        state: [check["finding"] for check in found if check["state"] == state and check["subject"] == subject]
        for state in ("ok", "warn", "fail")
    }


def doctor(folder: Path, *args: str) -> tuple[int, list[dict[str, Any]]]:
    done = run("doctor", *args, "-o", "json", cwd=folder)
    return done.returncode, json.loads(done.stdout)


# --- attach, list, detach --------------------------------------------------------------------------------


def test_attach_captures_immediately_and_a_later_server_continues(app: Path) -> None:
    folder = app.parent
    attached = run_json("source", "attach", "app.db", "--wal", "--data", "data", cwd=folder)
    assert attached["tables"] == ["users"] and "odd" in attached["uncaptured"]
    script(app, "INSERT INTO users VALUES (1, 'Ada')")
    with served(folder, "app.db"):
        script(app, "INSERT INTO users VALUES (2, 'Bob')")
    shown = run("log", "show", "--data", "data", "-o", "json", cwd=folder).stdout.splitlines()
    assert [json.loads(line)["after"]["name"] for line in shown] == ["Ada", "Bob"]


def test_attach_with_table_captures_only_that_table(app: Path) -> None:
    script(app, "CREATE TABLE other (id INTEGER PRIMARY KEY)")
    found = run_json("source", "attach", "app.db", "--wal", "--table", "users", cwd=app.parent)
    assert found["tables"] == ["users"]
    rows = run_json("source", "list", "app.db", cwd=app.parent)
    assert {row["table"]: row["captured"] for row in rows} == {"odd": False, "other": False, "users": True}


def test_source_list_shows_captured_tables_and_the_reason_for_the_rest(app: Path) -> None:
    before = run("source", "list", "app.db", cwd=app.parent).stdout
    assert "not captured yet" in before
    run_json("source", "attach", "app.db", "--wal", cwd=app.parent)
    rows = {row["table"]: row for row in run_json("source", "list", "app.db", cwd=app.parent)}
    assert (rows["users"]["captured"], rows["users"]["key"], rows["users"]["schema"]) == (True, ["id"], 1)
    assert not rows["odd"]["captured"] and "rowid" in rows["odd"]["note"]


def test_attach_without_wal_is_refused_and_keeps_the_file_unchanged(app: Path) -> None:
    before = app.read_bytes()
    assert "--wal" in refused(1, "source", "attach", "app.db", cwd=app.parent)
    assert app.read_bytes() == before


def test_detach_removes_every_headwater_object_from_the_file(app: Path) -> None:
    folder = app.parent
    run_json("source", "attach", "app.db", "--wal", cwd=folder)
    script(app, "INSERT INTO users VALUES (1, 'Ada')")
    gone = run_json("source", "detach", "app.db", cwd=folder)
    assert gone["changed"] and Path(folder / gone["log"]).exists()
    assert query(app, "SELECT name FROM sqlite_schema WHERE name LIKE '%headwater%'") == []
    assert query(app, "PRAGMA journal_mode") == [["delete"]]
    assert query(app, "SELECT * FROM users") == [[1, "Ada"]]
    assert sorted(path.name for path in folder.glob("app.db*")) == ["app.db"]
    assert run_json("source", "detach", "app.db", cwd=folder)["changed"] is False
    again = run("source", "detach", "app.db", cwd=folder).stdout
    assert again == f"{app} was not attached\n"


def test_detach_reports_only_the_log_of_its_file(app: Path) -> None:
    folder = app.parent
    script(folder / "other.db", "CREATE TABLE t (a INTEGER PRIMARY KEY)")
    run_json("source", "attach", "other.db", "--wal", cwd=folder)
    run_json("source", "attach", "shop=app.db", "--wal", cwd=folder)
    (folder / "headwater-data" / "broken.log.db").write_bytes(b"not a log")
    assert run_json("source", "detach", "app.db", cwd=folder)["log"] == "headwater-data/shop.log.db"
    assert run_json("source", "detach", "other.db", "--data", "elsewhere", cwd=folder)["log"] is None


def test_virtual_tables_are_listed_with_the_reason(app: Path) -> None:
    script(app, "CREATE VIRTUAL TABLE words USING fts5(text)")
    rows = {row["table"]: row for row in run_json("source", "list", "app.db", cwd=app.parent)}
    assert not rows["words"]["captured"] and "virtual" in rows["words"]["note"]
    warned = states(doctor(app.parent, "app.db")[1])["warn"]
    assert any("words cannot be captured: it is a virtual table" in finding for finding in warned)


def test_empty_databases_and_logs_are_reported_as_empty(tmp_path: Path) -> None:
    script(tmp_path / "app.db", "PRAGMA journal_mode=WAL; CREATE TABLE t (a INTEGER PRIMARY KEY)")
    script(tmp_path / "empty.db", "PRAGMA user_version = 1")
    assert run("source", "list", "empty.db", cwd=tmp_path).stdout == "no tables\n"
    assert "capturing 1 table of" in run("source", "attach", "app.db", cwd=tmp_path).stdout
    assert run("log", "show", cwd=tmp_path).stdout == "no changes yet\n"
    found = states(doctor(tmp_path, "app.db")[1])["ok"]
    assert "1 table is captured" in found and any(": no changes, generation" in finding for finding in found)


def test_attach_and_detach_are_refused_while_a_server_holds_the_file(app: Path) -> None:
    with served(app.parent, "app.db", "--wal") as server:
        assert f"process {server.process.pid}" in refused(1, "source", "detach", "app.db", cwd=app.parent)
        assert f"process {server.process.pid}" in refused(1, "source", "attach", "app.db", cwd=app.parent)


@pytest.mark.parametrize("verb", ["attach", "detach", "list"])
def test_source_command_on_a_missing_file_is_refused_and_creates_no_file(tmp_path: Path, verb: str) -> None:
    assert "there is no file" in refused(1, "source", verb, "nowhere.db", cwd=tmp_path)
    assert not (tmp_path / "nowhere.db").exists()
    assert "mysql://" in refused(2, "source", verb, "mysql://me@host/db", cwd=tmp_path)


# --- doctor ----------------------------------------------------------------------------------------------


def test_doctor_passes_in_a_fresh_folder_and_leaves_no_files(tmp_path: Path) -> None:
    code, found = doctor(tmp_path)
    assert code == 0
    assert {check["subject"] for check in found} == {"python", "sqlite", "data", "disk", "main"}
    assert not list(tmp_path.iterdir()), "looking must leave nothing behind"


def test_doctor_reports_the_defects_of_a_file_with_remedies(app: Path) -> None:
    script(app, "CREATE TABLE nokey (a); CREATE TRIGGER mine AFTER INSERT ON users BEGIN SELECT 1; END")
    code, found = doctor(app.parent, "app.db")
    seen = states(found)
    assert code == 1 and any("needs WAL" in finding for finding in seen["fail"])
    assert any("odd cannot be captured" in finding for finding in seen["warn"])
    assert any("nokey has no primary key" in finding for finding in seen["warn"])
    assert any("mine" in finding for finding in seen["ok"])
    assert all(check["remedy"] for check in found if check["state"] != "ok")
    assert doctor(app.parent, "app.db", "--wal")[0] == 0
    text = run("doctor", "app.db", cwd=app.parent).stdout
    assert "FAIL  main: journal mode is delete" in text and "→ Start with --wal" in text


def test_doctor_fails_files_that_are_not_sqlite_or_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("just a text, long enough to be looked at")
    script(tmp_path / "wide.db", "PRAGMA encoding = 'UTF-16le'; CREATE TABLE t (a INTEGER PRIMARY KEY)")
    code, found = doctor(tmp_path, "text.db", "wide.db", "--wal")
    assert code == 1
    assert "not a SQLite database" in states(found, "text")["fail"][0]
    assert "UTF-16le" in states(found, "wide")["fail"][0]


def test_doctor_reports_the_process_that_serves_the_file(app: Path) -> None:
    with served(app.parent, "app.db", "--wal") as server:
        code, found = doctor(app.parent, "app.db", "--data", "data")
        assert code == 0
        assert f"served by process {server.process.pid}" in states(found)["ok"]
    assert not any("served by" in finding for finding in states(doctor(app.parent, "app.db")[1])["ok"])


def test_doctor_warns_of_a_schema_changed_without_capture(app: Path) -> None:
    run_json("source", "attach", "app.db", "--wal", "--data", "data", cwd=app.parent)
    assert states(doctor(app.parent, "app.db", "--data", "data")[1])["warn"] == [
        "table odd cannot be captured: it has no primary key and its columns hide every name of the rowid"
    ]
    script(app, "CREATE TABLE later (id INTEGER PRIMARY KEY)")
    warned = states(doctor(app.parent, "app.db", "--data", "data")[1])["warn"]
    assert any("the schema changed" in finding for finding in warned)


def test_doctor_warns_of_a_log_that_does_not_match_the_file(app: Path) -> None:
    folder = app.parent
    run_json("source", "attach", "app.db", "--wal", "--data", "data", cwd=folder)
    shutil.copy(app, folder / "old.db")
    with served(folder, "app.db"):
        script(app, "INSERT INTO users VALUES (1, 'Ada')")
    warned = states(doctor(folder, "main=old.db", "--data", "data", "--wal")[1])["warn"]
    assert any("the log at 1" in finding for finding in warned), warned
    log = folder / "data" / "main.log.db"
    assert any("is missing" in finding for finding in states(doctor(folder, "app.db", "--data", "x")[1])["warn"])
    log.write_bytes(b"SQLite format 3\0" + b"\xff" * 4096)
    for rest in ("-wal", "-shm"):
        log.with_name(log.name + rest).unlink(missing_ok=True)
    code, found = doctor(folder, "app.db", "--data", "data")
    assert code == 1 and "damaged" in states(found)["fail"][0]
