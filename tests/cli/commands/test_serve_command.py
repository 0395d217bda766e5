"""serve, status, sql and log against one real server process."""

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.cli_process import Served, query, refused, run, run_json, script, served
from tests.suite.deadlines import wait_until

from headwater.log.disk.disk_log import DiskLog


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), forked=False) as found:
        found.sql("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT, doc JSON)")
        yield found


def test_server_announces_its_addresses_when_ready(server: Served) -> None:
    *words, grpc, databases, main = server.announced.split()
    assert words == ["headwater", "ready", "at", server.url, "grpc"]
    assert (databases, main) == ("databases", "main")
    assert grpc.startswith("127.0.0.1:") and grpc not in server.url


def test_server_is_a_single_process_without_outgoing_connections(server: Served) -> None:
    server.sql("CREATE TABLE captured (id INTEGER PRIMARY KEY)")
    server.sql("INSERT INTO captured VALUES (1)")
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    assert children == "", "everything is done by one process"
    mine = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    ports = {int(address.rpartition(":")[2]) for address in (server.url, server.grpc)}
    table = "".join(Path(f"/proc/net/{name}").read_text().partition("\n")[2] for name in ("tcp", "tcp6"))
    for line in table.splitlines():
        local, inode = line.split()[1], line.split()[9]
        if f"socket:[{inode}]" in mine:
            assert int(local.rpartition(":")[2], 16) in ports, "it listens, and opened no connection itself"


def test_sql_binds_arguments_as_json_or_as_text(server: Served) -> None:
    values = ["7", '"7"', "seven", "null", "true", "-1.5", '{"t": "bytes", "b64": "AA=="}', "[1, 2]"]
    asked = ", ".join(["typeof(?)"] * len(values))
    answer = server.sql(f"SELECT {asked}", *values)
    assert answer["rows"] == [["integer", "text", "text", "null", "integer", "real", "blob", "text"]]


def test_sql_prints_rows_as_table_or_json_and_the_count_of_changed_rows(server: Served) -> None:
    done = run("sql", "--server", server.url, "INSERT INTO notes(text) VALUES (?), (NULL)", "a\x1b[2Jb")
    assert done.stdout == "2 rows changed\n"
    done = run("sql", "--server", server.url, "-", stdin="SELECT text FROM notes\nORDER BY id")
    assert done.stdout == "text\na\\x1b[2Jb\nNULL\n"
    answer = run_json("sql", "--server", server.url, "SELECT text FROM notes ORDER BY id")
    assert answer == {"columns": ["text"], "rows": [["a\x1b[2Jb"], [None]], "affected": 0, "last_insert_id": 0}


def test_sql_prints_done_for_a_schema_change_and_a_row_count_otherwise(server: Served) -> None:
    def output_of(statement: str) -> str:
        return run("sql", "--server", server.url, statement).stdout

    assert output_of("CREATE TABLE short_lived (a)") == "done\n"
    assert output_of("-- away\n/* with it */ drop table short_lived") == "done\n"
    assert output_of("DELETE FROM notes WHERE id = -1") == "0 rows changed\n"


def test_refused_sql_exits_with_1(server: Served) -> None:
    assert "no such table" in refused(1, "sql", "--server", server.url, "SELECT * FROM nowhere")
    assert "not_found" in refused(1, "sql", "--server", server.url, "--db", "nowhere", "SELECT 1")
    assert "one statement" in refused(1, "sql", "--server", server.url, "SELECT 1; SELECT 2")


def test_status_shows_every_database_in_numbers(server: Served) -> None:
    found = run_json("status", "--server", server.url)
    main = found["databases"]["main"]
    assert found["healthy"] and main["ready"] and main["latest"] >= 1 and main["horizon"] == 1
    line = run("status", "--server", server.url).stdout.splitlines()[1].split()
    assert line[:3] == ["main", "ready", main["generation"]]


def test_log_show_reads_the_log_of_a_running_server(server: Served, tmp_path: Path) -> None:
    server.sql("INSERT INTO notes VALUES (100, 'one', '{}')")
    server.sql("UPDATE notes SET text = 'two' WHERE id = 100")
    server.sql("DELETE FROM notes WHERE id = 100")
    data = server.errors.parent / "data"
    wait_for_the_log(server)
    lines = run("log", "show", "--data", str(data), "-o", "json", "--limit", "3").stdout.splitlines()
    insert, update, delete = map(json.loads, lines)
    assert [each["op"] for each in (insert, update, delete)] == ["insert", "update", "delete"]
    assert insert["after"] == {"doc": {}, "id": 100, "text": "one"} and "before" not in insert
    assert (update["before"]["text"], update["after"]["text"], update["pk"]) == ("one", "two", [100])
    assert delete["before"]["text"] == "two" and "after" not in delete
    assert [each["offset"] for each in (insert, update, delete)] == [insert["seq"] + n for n in range(3)]
    assert list(insert)[:5] == ["seq", "db", "table", "op", "pk"] and insert["txn"]["last"] is True
    text = run("log", "show", str(data / "main.log.db"), "--after", str(insert["seq"]), "--limit", "1").stdout
    assert "id=100  text: one → two" in text and len(text.splitlines()) == 2
    end = str(delete["seq"] + 1000)
    assert run("log", "show", "--data", str(data), "--after", end).stdout == f"no changes after offset {end}\n"
    first = run("log", "show", "--data", str(data), "--after", "0", "--limit", "1").stdout
    assert "schema_change" in first and "CREATE TABLE notes" in first


def test_change_in_log_show_has_the_documented_fields_in_order(server: Served) -> None:
    before = time.time_ns() // 1_000_000
    server.sql("INSERT INTO notes VALUES (200, 'a', NULL), (201, 'b', NULL)")
    wait_for_the_log(server)
    data = server.errors.parent / "data"
    lines = run("log", "show", "--data", str(data), "-o", "json", "--limit", "2").stdout.splitlines()
    first, second = map(json.loads, lines)
    fields = ["seq", "db", "table", "op", "pk", "after", "commit_ts_ms", "lsn", "offset", "ts", "txn", "schema"]
    assert list(first) == fields
    assert (first["db"], first["table"], first["op"], first["pk"]) == ("main", "notes", "insert", [200])
    assert first["seq"] == first["lsn"] == first["offset"] == second["seq"] - 1
    assert before <= first["commit_ts_ms"] <= time.time_ns() // 1_000_000
    assert int(first["ts"].split(".")[0]) >= before and list(first["after"]) == sorted(first["after"])
    assert first["txn"] == {"id": first["txn"]["id"], "seq": 0, "last": False}
    assert second["txn"] == {"id": first["txn"]["id"], "seq": 1, "last": True}


def wait_for_the_log(server: Served) -> None:
    """Wait until the log file has every committed change: the server reads staged ones earlier."""
    log = DiskLog.open(server.errors.parent / "data" / "main.log.db", read_only=True)
    try:
        wait_until(lambda: captured(server) is not None, "the server has captured all changes")
        latest = captured(server) or 0
        wait_until(lambda: log.latest >= latest, "the log holds the newest change")
    finally:
        log.close()


def captured(server: Served) -> int | None:
    """Return the latest offset; None while changes are not in the log yet."""
    main = run_json("status", "--server", server.url)["databases"]["main"]
    return main["latest"] if main["lag_changes"] == 0 else None


def test_second_server_on_the_same_files_is_refused(server: Served) -> None:
    data = server.errors.parent / "data"
    text = refused(1, "serve", "--data", str(data), "--http", "127.0.0.1:0")
    assert f"process {server.process.pid}" in text


def test_port_in_use_exits_with_2(server: Served, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    assert "Another server" in refused(2, "serve", "--data", str(tmp_path), "--http", f"127.0.0.1:{port}")


def test_unreachable_server_exits_with_3(tmp_path: Path) -> None:
    assert "headwater serve" in refused(3, "status", "--server", "http://127.0.0.1:1")
    assert "headwater serve" in refused(3, "sql", "--server", "127.0.0.1:1", "SELECT 1")
    assert "headwater serve" in refused(3, "status", env={"HEADWATER_HTTP": "127.0.0.1:1"})


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h/path", "http://me:secret@h:1"])
def test_invalid_server_url_exits_with_2_without_showing_secrets(url: str) -> None:
    assert "secret" not in refused(2, "status", "--server", url)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_the_server_which_exits_with_0(tmp_path: Path, number: int) -> None:
    with served(tmp_path) as server:
        server.sql("CREATE TABLE t (a INTEGER PRIMARY KEY)")
        server.sql("INSERT INTO t VALUES (1)")
        assert server.stop(number) == 0
    assert server.errors.read_text() == ""
    shown = run("log", "show", "--data", str(tmp_path / "data"), "-o", "json")
    assert [json.loads(line)["op"] for line in shown.stdout.splitlines()] == ["schema_change", "insert"]


def test_files_are_served_as_databases_named_like_them(tmp_path: Path) -> None:
    script(tmp_path / "shop.db", "PRAGMA journal_mode=WAL; CREATE TABLE t (a INTEGER PRIMARY KEY)")
    script(tmp_path / "stock.db", "CREATE TABLE u (a INTEGER PRIMARY KEY)")
    assert "--wal" in refused(1, "serve", "shop.db", "stock.db", "--http", "127.0.0.1:0", cwd=tmp_path)
    with served(tmp_path, "shop.db", "stock.db", "--wal") as server:
        assert server.announced.split()[-1] == "shop,stock"
        server.sql("INSERT INTO u VALUES (1)", "--db", "stock")
        script(tmp_path / "shop.db", "INSERT INTO t VALUES (2)")
        args = ("shop.*", "--since", "earliest", "--limit", "1", "--server", server.url)
        assert "a=2" in run("tail", *args).stdout, "it is captured"
        assert sorted(run_json("status", "--server", server.url)["databases"]) == ["shop", "stock"]
    shown = run("log", "show", "--data", str(tmp_path / "data"), "--db", "shop", "-o", "json")
    assert [json.loads(line)["after"] for line in shown.stdout.splitlines()] == [{"a": 2}]
    assert query(tmp_path / "stock.db", "SELECT a FROM u") == [[1]]


def test_grpc_address_is_validated_and_absent_when_off(server: Served, tmp_path: Path) -> None:
    assert "an address" in refused(2, "serve", "--grpc", "nowhere", cwd=tmp_path)
    taken = server.announced.split()[5]
    assert "--grpc off" in refused(2, "serve", "--http", "127.0.0.1:0", "--grpc", taken, cwd=tmp_path)
    with served(tmp_path, "--grpc", "off") as without:
        assert "grpc" not in without.announced


# --- the credential --------------------------------------------------------------------------------------


def token_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_token_is_read_from_file_or_environment_and_never_printed(tmp_path: Path) -> None:
    secret = "correct-horse-battery"
    file = token_file(tmp_path, secret + "\n")
    with served(tmp_path, "--auth", "--token-file", file, forked=False) as server:
        without = refused(1, "status", "--server", server.url)
        assert "unauthorized" in without and "HEADWATER_TOKEN" in without and "--token-file" in without
        assert "unauthorized" in refused(1, "status", "--server", server.url, env={"HEADWATER_TOKEN": "wrong"})
        by_file = run("status", "--server", server.url, "--token-file", file)
        by_environment = run("status", "--server", server.url, env={"HEADWATER_TOKEN": secret})
        assert by_file.returncode == by_environment.returncode == 0
        arguments = Path(f"/proc/{server.process.pid}/cmdline")
        assert not arguments.exists() or secret not in arguments.read_text()
    assert secret not in server.announced + server.errors.read_text() + by_file.stdout + by_file.stderr
    for path in (tmp_path / "data").rglob("*"):
        assert secret.encode() not in path.read_bytes()


def test_token_file_readable_by_everyone_is_refused(tmp_path: Path) -> None:
    file = token_file(tmp_path, "hush", 0o644)
    assert "chmod 600" in refused(2, "serve", "--token-file", file, cwd=tmp_path)
    os.chmod(file, stat.S_IRUSR)
    Path(token_file(tmp_path, "", 0o600))
    assert "empty" in refused(2, "status", "--token-file", file)
    assert "cannot read" in refused(2, "status", "--token-file", str(tmp_path / "nowhere"))
