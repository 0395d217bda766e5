"""`headwater tail` against a separate server process: output, interruption, reconnects and refusals."""

import argparse
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_process import HEADWATER, TIMEOUT, Served, environment, refused, run, run_json, script, served
from tests.suite.deadlines import wait_until

from headwater.cli.failure import Failure
from headwater.cli.feed import LONGEST_WAIT, ConnectionBroken, Feed
from headwater.cli.filters import FeedTarget, key, moment, start
from headwater.cli.output.changes import line
from headwater.cli.remote import Remote
from headwater.client.sse import Frame

CHANGES = [
    "CREATE TABLE orders(id INTEGER PRIMARY KEY, total REAL, status TEXT)",
    "INSERT INTO orders VALUES (1, 10.5, 'new'), (2, 200, 'new')",
    "UPDATE orders SET total = total * 20 WHERE id = 1",
    "UPDATE orders SET total = 5 WHERE id = 2",
    "DELETE FROM orders WHERE id = 2",
    "CREATE TABLE stock(place TEXT, item INTEGER, left INTEGER, PRIMARY KEY (place, item))",
    "INSERT INTO stock VALUES ('a', 1, 10), ('b', 1, 20)",
    "CREATE TABLE east(id INTEGER PRIMARY KEY)",
]
OF_ORDERS, ALL = 6, 10  # changes


def execute(url: str, *statements: str, db: str = "main") -> None:
    """Run statements, and wait until their changes are in the log."""
    remote = Remote(url)
    try:
        for statement in statements:
            remote.call("sql.exec", sql=statement, db=db)
        wait_until(lambda: remote.call("stats.snapshot")["databases"][db]["lag_changes"] == 0, "all changes are logged")
    finally:
        remote.close()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server with a fixed history."""
    with served(tmp_path_factory.mktemp("shop")) as server:
        execute(server.url, *CHANGES)
        remote = Remote(server.url)
        remote.call("schema.create_database", db="east")
        remote.close()
        execute(server.url, "CREATE TABLE parcels(id INTEGER PRIMARY KEY)", db="east")
        yield server


def tail(url: str, *args: str, limit: int) -> list[str]:
    """Return the lines of a tail that ends by itself."""
    done = run("tail", *args, "--limit", str(limit), "--server", url)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.splitlines()


def tail_json(url: str, *args: str, limit: int) -> list[dict[str, Any]]:
    return [json.loads(each) for each in tail(url, *args, "-o", "json", limit=limit)]


@contextlib.contextmanager
def tailing(url: str, *args: str, **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a tail that has started to follow the log; kill it after a timeout, so that no read hangs."""
    env = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    command = [*HEADWATER, "tail", *args, "-v", "--server", url]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | kwargs
    with subprocess.Popen(command, env=env, **pipes) as process:
        watch = threading.Timer(TIMEOUT, process.kill)
        watch.start()
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("headwater tail: following ")
            yield process
        finally:
            watch.cancel()
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def errors_until(process: subprocess.Popen[str], words: str) -> list[str]:
    """Return the lines of stderr up to the one that holds `words`."""
    assert process.stderr is not None
    found = []
    for said in process.stderr:
        found.append(said)
        if words in said:
            return found
    raise AssertionError(f"never said {words!r}: {found}")


# --- what is printed -------------------------------------------------------------------------------------


def test_tail_prints_a_text_line_per_change(shop: Served) -> None:
    lines = tail(shop.url, "orders", "--since", "earliest", limit=OF_ORDERS)
    words = [each.split(maxsplit=4) for each in lines]
    assert [each[0] for each in words] == ["1", "2", "3", "4", "5", "6"]
    assert [each[2] for each in words] == ["schema_change", "insert", "insert", "update", "update", "delete"]
    assert {each[3] for each in words} == {"orders"}
    assert words[0][4] == CHANGES[0]
    assert words[1][4] == "id=1 status=new total=10.5"
    assert words[3][4] == "1  total: 10.5 → 210.0"
    assert words[5][4] == "id=2 status=new total=5.0"


def test_tail_json_prints_an_object_per_line(shop: Served) -> None:
    found = tail_json(shop.url, "main.orders", "--since", "earliest", limit=OF_ORDERS)
    assert [each["offset"] for each in found] == [1, 2, 3, 4, 5, 6]
    assert found[0]["ddl"] == CHANGES[0]
    assert found[3]["before"] == {"id": 1, "status": "new", "total": 10.5}
    assert found[3]["after"] == {"id": 1, "status": "new", "total": 210.0}


def test_tail_where_prints_rows_entering_as_insert_and_leaving_as_delete(shop: Served) -> None:
    found = tail_json(shop.url, "orders", "--where", "total > 100", "--since", "offset:1", limit=3)
    assert [(each["offset"], each["op"], each["pk"]) for each in found] == [
        (3, "insert", [2]),
        (4, "insert", [1]),
        (5, "delete", [2]),
    ]


@pytest.mark.parametrize(
    ("args", "offsets"),
    [
        (("orders", "--op", "update,delete"), [4, 5, 6]),
        (("orders", "--op", "delete", "--op", "insert"), [2, 3, 6]),
        (("orders", "--pk", "1", "--op", "insert,update"), [2, 4]),
        (("stock", "--pk", '["b", 1]', "--op", "insert"), [9]),
        (("orders", "--columns", "status", "--op", "insert,update,delete"), [2, 3, 6]),
        (("main",), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (("main.*", "--op", "schema_change"), [1, 7, 10]),
        (("default.stock", "--op", "insert"), [8, 9]),
    ],
)
def test_tail_filters_select_changes(shop: Served, args: tuple[str, ...], offsets: list[int]) -> None:
    found = tail_json(shop.url, *args, "--since", "earliest", limit=len(offsets))
    assert [each["offset"] for each in found] == offsets


@pytest.mark.parametrize(
    ("flags", "images"),
    [((), {"before", "after"}), (("--before",), {"before"}), (("--after",), {"after"})],
)
def test_tail_prints_both_images_unless_a_flag_selects(shop: Served, flags: tuple[str, ...], images: set[str]) -> None:
    (found,) = tail_json(shop.url, "orders", "--op", "update", "--since", "earliest", *flags, limit=1)
    assert images == {"before", "after"} & set(found)


def test_tail_prints_every_wire_format_unchanged(shop: Served) -> None:
    args = ("orders", "--op", "update", "--since", "earliest")
    (debezium,) = tail(shop.url, *args, "--format", "debezium_json", limit=1)
    assert json.loads(debezium)["op"] == "u"
    (cockroach,) = tail(shop.url, *args, "--format", "cockroach_wrapped_json", limit=1)
    assert json.loads(cockroach)["topic"] == "orders"


@pytest.mark.parametrize("since", ["1h", "2001-01-01", "2001-01-01T00:00:00Z", "earliest", "offset:0"])
def test_tail_begins_at_the_since_argument(shop: Served, since: str) -> None:
    found = tail_json(shop.url, "main", "--since", since, limit=ALL)
    assert [each["offset"] for each in found] == list(range(1, ALL + 1))


def test_tail_since_snapshot_prints_the_rows_first(shop: Served) -> None:
    (row,) = tail_json(shop.url, "orders", "--since", "snapshot", limit=1)
    assert row["snapshot"] and row["after"] == {"id": 1, "status": "new", "total": 210.0}
    (line,) = tail(shop.url, "orders", "--since", "snapshot", limit=1)
    assert line.split()[2:4] == ["row", "orders"]


def test_tail_prints_colours_only_on_a_terminal(shop: Served) -> None:
    args = ("orders", "--since", "earliest")
    assert not any("\x1b" in each for each in tail(shop.url, *args, limit=2))
    assert "\x1b[32m" in on_a_terminal(shop.url, *args, "--limit", "2")
    assert "\x1b" not in on_a_terminal(shop.url, *args, "--limit", "2", "--no-color")


def on_a_terminal(url: str, *args: str) -> str:
    ours, theirs = pty.openpty()
    env = environment(TERM="xterm-256color", COLUMNS="200")
    command = [*HEADWATER, "tail", *args, "--server", url]
    with subprocess.Popen(command, env=env, stdout=theirs, stdin=theirs) as process, os.fdopen(ours, "rb", 0) as seen:
        os.close(theirs)
        text = b"".join(iter(lambda: read_terminal(seen.fileno()), b"")).decode()
        assert process.wait(TIMEOUT) == 0
    return text


def read_terminal(terminal: int) -> bytes:
    """Return available output; b"" after the end."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


# --- which table -----------------------------------------------------------------------------------------


def test_name_of_both_a_table_and_a_database_is_refused_as_ambiguous(shop: Served) -> None:
    said = refused(1, "tail", "east", "--server", shop.url)
    assert "a table of 'main', and also a database" in said and "main.east" in said and "'east.*'" in said
    (found,) = tail_json(shop.url, "east.*", "--since", "earliest", limit=1)
    assert (found["db"], found["table"]) == ("east", "parcels")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ordrs", "there is no table 'ordrs' in 'main', and no such database\nhint: Did you mean main.orders?"),
        ("parcels", "hint: Did you mean east.parcels?"),
        ("main.nothing", "there is no table 'nothing' in database 'main'"),
        ("west.orders", "there is no database 'west'"),
    ],
)
def test_unknown_name_in_tail_is_refused_with_the_nearest_name(shop: Served, name: str, said: str) -> None:
    assert said in refused(1, "tail", name, "--server", shop.url)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("main.orders", "--where", "nowhere > 1"), "no such column: nowhere"),
        (("main.orders", "--pk", "[1, 2]"), "the key of 'orders' has 1"),
        (("main.orders", "--op", "upsert"), "`ops` holds 'upsert'"),
        (("main.orders", "--columns", "stats"), "Did you mean 'status'?"),
        (("main.orders", "--format", "xml"), "Formats are objects_json"),
        (("main.orders", "--since", "offset:999999"), "beyond the latest offset"),
        (("main", "--where", "total > 1"), "`where` needs exactly one table"),
    ],
)
def test_refusal_of_the_server_is_printed_with_its_remedy(shop: Served, args: tuple[str, ...], said: str) -> None:
    assert said in refused(1, "tail", *args, "--server", shop.url)


@pytest.mark.parametrize(
    "args", [(), ("orders", "--since", "yesterday"), ("orders", "--limit", "-1"), ("orders", "--since", "offset:x")]
)
def test_wrong_tail_usage_exits_with_2(args: tuple[str, ...]) -> None:
    refused(2, "tail", *args)


def test_tail_without_a_server_exits_with_3() -> None:
    assert "no server answers" in refused(3, "tail", "orders", "--server", "http://127.0.0.1:1")


def test_tail_sends_its_credential_with_the_stream(tmp_path: Path) -> None:
    with served(tmp_path, "--auth", env={"HEADWATER_TOKEN": "open sesame"}) as server:
        assert "HEADWATER_TOKEN" in refused(1, "tail", "orders", "--server", server.url)
        server.sql("CREATE TABLE orders(id INTEGER PRIMARY KEY)", env={"HEADWATER_TOKEN": "open sesame"})
        args = ("orders", "--since", "earliest", "--limit", "1", "--server", server.url)
        done = run("tail", *args, env={"HEADWATER_TOKEN": "open sesame"})
        assert done.returncode == 0 and "CREATE TABLE orders" in done.stdout


# --- how it lives and ends -------------------------------------------------------------------------------


def test_tail_prints_changes_as_they_are_committed_until_ctrl_c(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        execute(server.url, *CHANGES[:2])
        with tailing(server.url, "orders") as process:
            for number in (7, 8):
                execute(server.url, f"INSERT INTO orders VALUES ({number}, 1, 'now')")
                assert f"id={number} status=now" in read_line(process), "it is seen before the next one is written"
            execute(server.url, "ALTER TABLE orders ADD COLUMN note TEXT")
            assert "schema_change" in read_line(process)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=TIMEOUT)
            assert (process.returncode, out) == (130, "") and "Traceback" not in errors


def test_tail_exits_with_0_when_its_output_is_closed(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        execute(server.url, *CHANGES[:2])
        with tailing(server.url, "orders", "--since", "earliest") as process:
            assert read_line(process) and process.stdout is not None
            process.stdout.close()
            execute(server.url, "DELETE FROM orders")
            assert process.wait(TIMEOUT) == 0
            assert process.stderr is not None and "error" not in process.stderr.read()


def test_tail_prints_checkpoints_on_standard_error(tmp_path: Path) -> None:
    with served(tmp_path, env={"HEADWATER_FEEDS_CHECKPOINT_SECONDS": "0.2"}) as server:
        execute(server.url, *CHANGES[:2])
        with tailing(server.url, "orders") as process:
            assert "checkpoint: everything up to " in errors_until(process, "offset 3")[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_tail_continues_after_a_server_restart_without_gap_or_repeat(tmp_path: Path, number: signal.Signals) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(served(tmp_path))
        execute(first.url, *CHANGES[:1])
        process = stack.enter_context(tailing(first.url, "orders", "-o", "json"))
        execute(first.url, "INSERT INTO orders VALUES (1, 1, 'before')")
        seen = [json.loads(read_line(process))]
        first.stop(number)
        errors_until(process, "connection lost: ")
        script(tmp_path / "data" / "main.db", "INSERT INTO orders VALUES (2, 2, 'away')")
        stack.enter_context(again(tmp_path, first))
        execute(first.url, "INSERT INTO orders VALUES (3, 3, 'back')")
        seen += [json.loads(read_line(process)) for _ in range(2)]
        assert [(each["offset"], each["after"]["id"]) for each in seen] == [(2, 1), (3, 2), (4, 3)]
        errors_until(process, "connected again after offset 2")


def test_connection_lost_before_the_first_change_loses_no_change_in_tail(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(served(tmp_path))
        execute(first.url, *CHANGES[:1])
        process = stack.enter_context(tailing(first.url, "orders", "-o", "json"))
        first.stop(signal.SIGKILL)
        script(tmp_path / "data" / "main.db", "INSERT INTO orders VALUES (2, 2, 'away')")
        stack.enter_context(again(tmp_path, first))
        assert json.loads(read_line(process))["after"]["status"] == "away"


@contextlib.contextmanager
def again(folder: Path, before: Served) -> Iterator[None]:
    """Start the same server again at the same address."""
    address = before.url.removeprefix("http://")
    command = [*HEADWATER, "serve", "--data", str(folder / "data"), "--http", address, "--grpc", "off"]
    with (
        before.errors.open("a") as stderr,
        subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert read_line(process).startswith("headwater ready"), before.errors.read_text()
            yield
        finally:
            process.terminate()
            process.wait(TIMEOUT)


def test_tail_since_an_expired_offset_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with served(tmp_path, env={"HEADWATER_LOG_RETENTION_EVENTS": "2"}) as server:
        execute(server.url, *CHANGES[:5])
        wait_until(lambda: run_json("status", "--server", server.url)["databases"]["main"]["horizon"] == 5)
        for since in ("offset:1", "2001-01-01"):
            said = refused(1, "tail", "orders", "--since", since, "--server", server.url)
            assert "offsets 5 to 6 are retained" in said
            assert "hint: --since earliest begins with the oldest change there is" in said
        assert len(tail(server.url, "orders", "--since", "earliest", limit=2)) == 2


def test_tail_ends_with_the_reason_when_its_filter_column_is_dropped(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        execute(server.url, *CHANGES[:2])
        with tailing(server.url, "orders", "--where", "total > 100") as process:
            execute(server.url, "ALTER TABLE orders DROP COLUMN total", "INSERT INTO orders VALUES (9, 'new')")
            _, errors = process.communicate(timeout=TIMEOUT)
            assert process.returncode == 1 and "error: " in errors and "total" in errors


def test_tail_flags_are_all_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = page.split("## `headwater tail`")[1].split("\n## ")[0]
    flags = set(re.findall(r"--[a-z-]+", run("tail", "--help").stdout)) - {"--help"}
    assert set(re.findall(r"^\| `(--[a-z-]+) ?[A-Z]*` \|", section, re.MULTILINE)) == flags


# --- the parts -------------------------------------------------------------------------------------------


class Unsteady(Feed):
    """A feed with given connections: each yields frames and ends, or fails."""

    def __init__(self, *connections: list[Frame] | Exception) -> None:
        self.notices: list[str] = []
        super().__init__("http://x", FeedTarget("main", None), {}, notice=self.notices.append)
        self._each = iter(connections)

    def connect(self) -> Generator[list[Frame]]:
        each = next(self._each)
        if isinstance(each, Exception):
            raise each
        return (frames for frames in [each])


BROKEN = ConnectionBroken("refused", Failure("no server", exit_code=3))
FRAME = Frame("7", "insert", b"{}")


def test_lost_connection_is_retried_with_growing_waits_and_reported_once() -> None:
    feed = Unsteady([FRAME], *[BROKEN] * 8, [FRAME], Failure("gone"))
    waits: list[float] = []
    got = []
    with pytest.raises(Failure, match="gone"):
        got.extend(feed.follow(sleep=waits.append))
    assert waits[:8] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_WAIT, LONGEST_WAIT]
    assert waits[9] == 0.1, "a frame came: it begins anew"
    assert got == [[], [FRAME], [], [FRAME]]
    assert [notice.split(":")[0] for notice in feed.notices] == [
        "connection lost",
        "connected again",
        "connection lost",
    ]


def test_failed_first_connection_is_not_retried() -> None:
    with pytest.raises(Failure, match="no server"):
        next(Unsteady(BROKEN, [FRAME]).follow(sleep=lambda seconds: None))


def test_since_times_and_offsets_are_parsed() -> None:
    assert moment("10m", 3_600_000) == 3_000_000
    assert moment("1.5h", 7_200_000) == 1_800_000
    assert moment("500ms", 1000) == 500
    assert moment("1w", 5) == 0, "before 1970 is 1970"
    assert moment("1970-01-01T00:00:01Z") == 1000
    assert moment("1970-01-01T01:00:01.5+01:00") == 1500
    assert start("offset:12") == {"offset": 12}
    assert [start(word) for word in ("latest", "earliest", "snapshot")] == ["latest", "earliest", "snapshot"]
    for text in ("", "10", "m", "10x", "-5m", "offset:-1", "0001-01-01T00:00+99:00"):
        with pytest.raises(argparse.ArgumentTypeError):
            start(text)


def test_key_arguments_are_parsed_as_json_or_text() -> None:
    assert [key(text) for text in ("7", '"7"', "abc", "[1, null]")] == [[7], ["7"], ["abc"], [1, None]]


def test_row_without_a_primary_key_is_printed_with_its_identity() -> None:
    found = {"offset": 1, "commit_ts_ms": 0, "table": "t\x1b", "op": "update", "identity": {"rowid": 4}}
    assert line(found | {"before": {"a": 1}, "after": {"a": None}}).endswith("rowid=4  a: 1 → NULL")
    assert line(found | {"before": {"a": 1}, "after": {"a": 1}}).endswith("rowid=4  unchanged")
    assert line(found).endswith("t\\x1b         rowid=4")
