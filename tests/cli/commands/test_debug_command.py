"""`headwater debug changefeed` against a real server: events, interruption, reconnects and refusals."""

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_process import HEADWATER, TIMEOUT, Served, environment, refused, run, served

from headwater.cli.commands.debug import asked_for, keys_of, line
from headwater.cli.failure import Failure
from headwater.model.keys.key import encode_key

SCHEMA = (
    "CREATE TABLE orders(id INTEGER PRIMARY KEY, total REAL)",
    "INSERT INTO orders VALUES (1, 10.5), (2, 200), (3, 7)",
    "UPDATE orders SET total = 11 WHERE id = 1",
    "DELETE FROM orders WHERE id = 2",
)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("debugged")) as server:
        for statement in SCHEMA:
            server.sql(statement)
        yield server


def changefeed_json(server: Served, *args: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in changefeed(server, *args, "-o", "json")]


def changefeed(server: Served, *args: str) -> list[str]:
    done = run("debug", "changefeed", *args, "--grpc", server.grpc)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.splitlines()


@contextlib.contextmanager
def running(*args: str) -> Iterator[subprocess.Popen[str]]:
    """Run a feed; kill it after a timeout, so that no read hangs."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*HEADWATER, "debug", "changefeed", *args], env=environment(), **pipes) as process:
        watch = threading.Timer(TIMEOUT, process.kill)
        watch.start()
        try:
            yield process
        finally:
            watch.cancel()
            if process.poll() is None:
                process.kill()


def test_debug_changefeed_prints_events_as_json(shop: Served) -> None:
    events = [
        json.loads(each) for each in changefeed(shop, "orders", "--base", "offset:1", "--limit", "5", "-o", "json")
    ]
    assert [(each["key"], each["value"]) for each in events] == [
        (encode_key((1,)).hex(), {"id": 1, "total": 10.5}),
        (encode_key((2,)).hex(), {"id": 2, "total": 200.0}),
        (encode_key((3,)).hex(), {"id": 3, "total": 7.0}),
        (encode_key((1,)).hex(), {"id": 1, "total": 11.0}),
        (encode_key((2,)).hex(), None),
    ]
    assert all("prev_value" not in each and each["table"] == "orders" and each["ts"] for each in events)


@pytest.mark.parametrize(
    "span, ids",
    [("2", [2, 2]), ("[2]", [2, 2]), ("2..", [2, 3, 2]), ("..1", [1, 1]), ("2..3", [2, 3, 2])],
)
def test_debug_changefeed_of_a_span_prints_only_its_keys(shop: Served, span: str, ids: list[int]) -> None:
    lines = changefeed(shop, "main.orders", span, "--base", "offset:0", "--limit", str(len(ids)), "-o", "json")
    keys = [each["key"] for each in map(json.loads, lines) if each["event"] == "value"]
    assert keys == [encode_key((id,)).hex() for id in ids]


def test_debug_changefeed_prints_events_as_text(shop: Served) -> None:
    lines = changefeed(shop, "main.*", "--base", "offset:0", "--diff", "--limit", "5")
    words = [each.partition("  ")[2] for each in lines]
    assert words[0] == f"orders  {SCHEMA[0]}" and words[1] == 'orders  put {"id": 1, "total": 10.5}'
    assert words[4] == 'orders  put {"id": 1, "total": 11.0}  was {"id": 1, "total": 10.5}'
    assert words[5] == 'orders  delete 2  was {"id": 2, "total": 200.0}'


def test_debug_changefeed_until_a_past_time_ends_with_a_checkpoint(shop: Served) -> None:
    events = [
        json.loads(each) for each in changefeed(shop, "orders", "--base", "offset:0", "--until", "0s", "-o", "json")
    ]
    assert events[-1]["event"] == "checkpoint" and "steady_state" in [each["event"] for each in events]
    ts = events[-1]["ts"]
    again = changefeed_json(shop, "orders", "--base", ts, "--until", "0s")
    assert not [each for each in again if each["event"] == "value"]


def test_debug_changefeed_with_skip_catchup_begins_at_steady_state(shop: Served) -> None:
    lines = changefeed(shop, "orders", "--base", "offset:0", "--skip-catchup", "--until", "1m")
    assert lines[0].startswith("-- steady at offset") and lines[-1].endswith("  all")


def test_debug_changefeed_ends_with_130_on_ctrl_c(shop: Served) -> None:
    with running("orders", "--grpc", shop.grpc) as process:
        assert process.stdout is not None and process.stdout.readline().startswith("-- steady")
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
        assert process.stderr is not None and process.stderr.read() == ""


def test_debug_changefeed_reconnects_from_the_last_checkpoint(tmp_path: Path) -> None:
    with served(tmp_path, "--grpc", "127.0.0.1:0") as first:
        first.sql(SCHEMA[0])
        with running("orders", "--grpc", first.grpc, "-o", "json") as process:
            assert process.stdout is not None and process.stderr is not None
            while json.loads(process.stdout.readline())["event"] != "checkpoint":
                pass
            assert first.stop() == 0
            assert "connecting again" in process.stderr.readline()
            with served(tmp_path, "--grpc", first.grpc) as second:
                second.sql(SCHEMA[1])
                found: list[int] = []
                while len(found) < 3:
                    event = json.loads(process.stdout.readline())
                    found += [event["value"]["id"]] if event["event"] == "value" else []
                assert found == [1, 2, 3]
                process.send_signal(signal.SIGINT)
                assert process.wait(TIMEOUT) == 130


def test_debug_changefeed_reads_its_credential_from_the_environment_or_a_file(tmp_path: Path) -> None:
    with served(tmp_path, env={"HEADWATER_TOKEN": "s3cret"}) as server:
        args = ("debug", "changefeed", "main.*", "--until", "0s", "--grpc", server.grpc)
        assert "HEADWATER_TOKEN" in refused(1, *args)
        file = tmp_path / "token"
        file.write_text("s3cret")
        file.chmod(0o600)
        for more, env in (((), {"HEADWATER_TOKEN": "s3cret"}), (("--token-file", str(file)), {})):
            done = run(*args, *more, env=env)
            assert (done.returncode, done.stderr) == (0, "") and "steady" in done.stdout


@pytest.mark.parametrize(
    "exit_code, args, words",
    [
        (1, ("absent",), "there is no table 'absent'"),
        (1, ("absent.orders",), "there is no database 'absent'"),
        (1, ("orders", "--base", "offset:99999"), "beyond the latest offset"),
        (1, ("orders", '{"a": 1}'), "error: "),
        (2, ("orders", "--base", "soon"), "is not a time"),
        (2, ("orders", "--base", "offset:x"), "not a number"),
        (2, ("orders", "--until", "soon"), "is not a time"),
        (2, ("orders", ".."), "the span `..` has no key"),
        (2, ("main.*", "1"), "a span needs one table"),
    ],
)
def test_refused_debug_changefeed_prints_a_remedy(
    shop: Served, exit_code: int, args: tuple[str, ...], words: str
) -> None:
    assert words in refused(exit_code, "debug", "changefeed", *args, "--once", "--grpc", shop.grpc)


def test_debug_changefeed_without_a_grpc_server_fails_with_the_reason() -> None:
    assert "no gRPC server answers at 127.0.0.1:1" in refused(3, "debug", "changefeed", "t", "--grpc", "127.0.0.1:1")
    done = run("debug", "changefeed", "t", env={"HEADWATER_GRPC": "off"})
    assert done.returncode == 2 and "gRPC is off" in done.stderr


def test_span_arguments_are_parsed() -> None:
    assert keys_of("7") == {"prefix": [{"t": "i64", "v": 7}]}
    assert keys_of('[1, "a"]..b') == {
        "lower_bound": [{"t": "i64", "v": 1}, {"t": "str", "v": "a"}],
        "upper_bound": [{"t": "str", "v": "b"}],
    }
    assert asked_for("t", None) == ("main", [{"table": "t"}]) and asked_for("shop.*", None) == ("shop", [])
    with pytest.raises(Failure):
        keys_of("..")


def test_debug_lines_show_every_event_and_escape_control_characters() -> None:
    assert line({"event": "error", "reason": "SLOW_CONSUMER", "message": "x"}) == "-- SLOW_CONSUMER: x"
    odd = {"event": "value", "ts": "1.0", "table": "t", "key": "ff", "value": None}
    assert line(odd) == "1.0  t  delete ff"
    span = {"table": "t", "start_key": "01"}
    assert line({"event": "delete_range", "ts": "1.0", "span": span}) == "1.0  t [01, )  delete all"
    assert "\x1b" not in line({"event": "schema_change", "ts": "1.0", "table": "t\x1b[31m", "ddl": ""})
