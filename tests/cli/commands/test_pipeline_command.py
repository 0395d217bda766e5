"""`headwater pipeline`: the output of a run, how it stops, and the verbs that need no Spark."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.cli.cli_process import TIMEOUT, environment, run, served
from tests.doc_pages import code, page, table
from tests.suite.deadlines import PATIENCE

from headwater.cli.commands.pipeline_status import state_of
from headwater.cli.main import main
from headwater.cli.output.pipeline_bars import ProgressBars
from headwater.cli.output.pipeline_lines import JsonLines, ProgressLines, compared
from headwater.cli.output.pipeline_progress import TableProgress, duration
from headwater.client import Client
from headwater.errors import PipelineError, Unavailable
from headwater.model.keys.key import Span
from headwater.pipeline.run.ownership import take
from headwater.pipeline.run.progress import MetaStore
from headwater.pipeline.run.spec import read_spec
from headwater.pipeline.run.table_report import Difference
from headwater.pipeline.run.task import LOG, SNAPSHOT, RangeProgress, Task

FILE = """
[pipeline]
name = "lake"
server = "http://127.0.0.1:9"  # nobody is there

[[table]]
tables = ["orders", "customers"]

[table.sink]
kind = "delta"
path = "lake/{table}"
"""
LEFT = RangeProgress(1, 1, Span(b"", b"k"), LOG, 10, 12, b"", 20, rows_estimate=600)
RIGHT = RangeProgress(2, 1, Span(b"k"), SNAPSHOT, 10, 13, b"m", 0, rows_estimate=400)
TASK = Task("lake", "main", "orders")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lake.toml").write_text(FILE)
    return tmp_path


@pytest.fixture
def meta(folder: Path) -> Iterator[MetaStore]:
    """Yield the meta store of a pipeline that ran: orders owned in mid-snapshot, customers done."""
    spec = read_spec(folder / "lake.toml")
    with MetaStore.open(spec.meta) as store:
        for table in spec.tables:
            store.subscribe(spec, table)
        customers, orders = store.tasks()
        store.save(orders, [LEFT, RIGHT], take(store, orders, "host:1:ab", 3600))
        store.save(customers, [replace(LEFT, span=Span.all())], take(store, customers, "gone", -1))
        store.verified(customers, 18)
        yield store


class Asked:
    """The command line in this process; commands run in the folder of the test."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str) -> str:
        """Return the output of a command; fail if it fails."""
        assert main(["pipeline", *args]) == 0
        out, err = self._capsys.readouterr()
        assert err == ""
        return out

    def json(self, *args: str) -> Any:
        return json.loads(self(*args, "-o", "json"))

    def refused(self, exit_code: int, *args: str) -> str:
        """Return the error text of a command that must fail with this exit code."""
        assert main(["pipeline", *args]) == exit_code
        out, err = self._capsys.readouterr()
        assert out == "" and err.startswith("error: ")
        return err


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Asked:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return Asked(capsys)


# --- status and list -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("meta")
def test_status_shows_every_table_without_spark_and_without_a_server(folder: Path) -> None:
    done = run("pipeline", "status", "lake.toml", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert [re.sub(" +", " ", line) for line in done.stdout.splitlines()] == [
        "pipeline table state stage ranges rows offset lag verified note",
        "lake main.customers stopped log 1/1 600 20 ? at 18",
        "lake main.orders running snapshot 1/2 1,000 never host:1:ab",
    ]


@pytest.mark.usefixtures("meta")
def test_json_status_includes_every_range(ask: Asked) -> None:
    customers, orders = ask.json("status")
    assert (customers["offset"], customers["lag"], customers["verified_through"]) == (20, None, 18)
    assert (orders["state"], orders["owner"], orders["offset"]) == ("running", "host:1:ab", None)
    assert [(each["range"], each["stage"], each["end"]) for each in orders["ranges"]] == [
        (1, "log", "6b"),
        (2, "snapshot", None),
    ]


def test_status_shows_the_lag_of_a_sink_when_the_server_answers(ask: Asked, folder: Path) -> None:
    with served(folder) as server:
        for statement in (
            "CREATE TABLE customers(id INTEGER PRIMARY KEY)",
            "INSERT INTO customers VALUES (1), (2), (3)",
        ):
            server.sql(statement)
        with Client(server.url) as client:
            client.describe("main", "customers", after=3, wait_ms=10_000)  # until it is durable
        (folder / "lake.toml").write_text(FILE.replace("http://127.0.0.1:9", server.url))
        spec = read_spec(folder / "lake.toml")
        with MetaStore.open(spec.meta) as store:
            task = store.subscribe(spec, spec.tables[1])
            store.save(task, [replace(LEFT, last_offset=1, span=Span.all())], take(store, task, "me", 3600))
        (found,) = ask.json("status", "lake.toml")
    assert (found["table"], found["offset"], found["latest"], found["lag"]) == ("customers", 1, 4, 3)


@pytest.mark.usefixtures("meta")
def test_pipeline_list_prints_a_line_per_pipeline(ask: Asked) -> None:
    (found,) = ask.json("list", "--meta", "lake.toml")
    assert (found["pipeline"], found["tables"]) == ("lake", ["main.customers", "main.orders"])
    assert found["states"] == ["stopped", "running"]
    done = ask("list")
    assert done.splitlines()[1].startswith("lake      main.customers, main.orders  stopped, running")


def test_pipeline_list_does_not_create_a_missing_meta_store(ask: Asked, folder: Path) -> None:
    assert "there is no meta store headwater-pipeline.db" in ask.refused(2, "list")
    assert [each.name for each in folder.iterdir()] == ["lake.toml"]


@pytest.mark.parametrize("meta", ["postgresql://me:tiger@db/x", "postgresql://me@db/x?password=tiger"])
def test_password_in_an_argument_is_refused_without_showing_it(ask: Asked, folder: Path, meta: str) -> None:
    said = ask.refused(2, "list", "--meta", meta)
    assert "seen by other users" in said and "tiger" not in said


def test_pipeline_states_are_documented() -> None:
    tasks = [
        replace(TASK, owner="a", owner_left_ms=5),
        TASK,
        replace(TASK, error="x"),
        replace(TASK, cancelled=True),
        replace(TASK, owner="a", owner_left_ms=5, cancelled=True, error="x"),
    ]
    documented = table(page("docs/pipeline.md"), "state", "meaning")
    assert [row[0] for row in documented] == [code(state_of(task)) for task in tasks]


# --- cancel and reset ------------------------------------------------------------------------------------


def test_cancel_command_stops_a_table_or_a_pipeline_and_is_undone(meta: MetaStore, ask: Asked) -> None:
    done = ask("cancel", "lake", "orders")
    assert done == "main.orders of lake stops after its current commit\n"
    assert [task.cancelled for task in meta.tasks()] == [False, True]
    assert len(ask.json("cancel", "lake")) == 2
    assert [task.cancelled for task in meta.tasks()] == [True, True]
    done = ask("cancel", "lake", "main.orders", "--undo")
    assert done == "main.orders of lake may run again\n"
    assert [task.cancelled for task in meta.tasks()] == [True, False]


@pytest.mark.usefixtures("meta")
@pytest.mark.parametrize("verb", ["cancel", "reset"])
def test_unknown_pipeline_or_table_is_refused_by_its_name(ask: Asked, verb: str) -> None:
    assert "has no pipeline 'lak'" in ask.refused(1, verb, "lak")
    said = ask.refused(1, verb, "lake", "shop.orders")
    assert "has no table 'shop.orders' of pipeline 'lake'" in said


def test_reset_command_requires_yes_and_is_refused_while_a_run_owns_the_table(meta: MetaStore, ask: Asked) -> None:
    customers, orders = meta.tasks()
    assert "Confirm with --yes" in ask.refused(2, "reset", "lake", "customers")
    assert not meta.is_reset(customers)
    done = ask("reset", "lake", "customers", "--yes")
    assert done == "main.customers of lake takes a new snapshot when it is run again\n"
    assert meta.is_reset(customers) and meta.progress(customers) == []
    assert "worked on by host:1:ab" in ask.refused(1, "reset", "lake", "--yes")
    assert meta.progress(orders) == [LEFT, RIGHT]
    assert len(ask.json("reset", "lake", "--yes", "--force")) == 2
    assert meta.progress(orders) == []


# --- init ------------------------------------------------------------------------------------------------


def test_init_refuses_to_overwrite_a_pipeline_file_without_force(ask: Asked, folder: Path) -> None:
    done = ask("init")
    assert done.endswith("headwater pipeline run pipeline.toml\n")
    assert read_spec(folder / "pipeline.toml").name == "lake"
    (folder / "pipeline.toml").write_text("mine")
    assert "exists already" in ask.refused(2, "init")
    assert (folder / "pipeline.toml").read_text() == "mine"
    assert ask("init", "--force")


def test_init_writes_the_server_address_of_the_settings(
    ask: Asked, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_HTTP", "0.0.0.0:8181")
    assert "for the server at http://127.0.0.1:8181. " in ask("init")
    assert read_spec(folder / "pipeline.toml").server == "http://127.0.0.1:8181"
    ask("init", "--force", "--server", "https://db.example.org:7171", "--table", "notes")
    assert read_spec(folder / "pipeline.toml").server == "https://db.example.org:7171"
    assert "tiger" not in ask.refused(2, "init", "--force", "--server", "http://me:tiger@host")
    assert "# the Headwater server to read from" in (folder / "pipeline.toml").read_text()


def test_init_writes_the_tables_of_its_arguments(ask: Asked, folder: Path) -> None:
    def carried(*names: str) -> list[tuple[str, str, str]]:
        assert "Name your tables" not in ask("init", "--force", *(word for name in names for word in ("--table", name)))
        spec = read_spec(folder / "pipeline.toml")
        return [
            (each.db, each.table, os.path.relpath(each.sink.settings["path"], folder / "lake")) for each in spec.tables
        ]

    assert carried("notes") == [("main", "notes", "notes")]
    assert carried('a "b"', "snö", "main.snö") == [("main", 'a "b"', 'a "b"'), ("main", "snö", "snö")]
    assert carried("notes", "web.notes", "web.visits") == [
        ("main", "notes", "main/notes"),
        ("web", "notes", "web/notes"),
        ("web", "visits", "web/visits"),
    ]
    assert (folder / "pipeline.toml").read_text().count("# where = ") == 2


# --- run and verify, with a pipeline that is played ------------------------------------------------------

PLAYED = """
import sys, threading
from types import ModuleType, SimpleNamespace
from headwater.cli.main import main
from headwater.pipeline.run.task import Task

def run(spec, *, once, master, watcher, stop, then_verify):
    for table in spec.tables:
        watcher.stage(Task(spec.name, table.db, table.table), "log")
    print("working", flush=True)
    if sys.argv[1] == "patient":
        stop.wait()
    else:
        threading.Event().wait()
    return SimpleNamespace(is_good=True)

def verify(spec, **given):
    print("working", flush=True)
    threading.Event().wait()

for home, name, act in (("runner", "run", run), ("verify.verify", "verify", verify)):
    module = sys.modules[f"headwater.pipeline.{home}"] = ModuleType(name)
    setattr(module, name, act)
raise SystemExit(main(["pipeline", "verify" if sys.argv[1] == "verify" else "run", "lake.toml"]))
"""


def played(folder: Path, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PLAYED, how],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "working\n":
            break
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_a_run_after_its_commit_with_exit_code_0(folder: Path, number: int) -> None:
    process = played(folder, "patient")
    process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, errors) == (
        0,
        "headwater pipeline stops after the current commit; once more: at once\n",
    )


def test_second_signal_ends_a_run_immediately(folder: Path) -> None:
    process = played(folder, "stubborn")
    assert process.stderr is not None
    process.send_signal(signal.SIGTERM)
    assert "once more" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == -signal.SIGTERM


def test_verify_ends_at_the_first_signal(folder: Path) -> None:
    process = played(folder, "verify")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == -signal.SIGTERM


class Played:
    """Replaces the modules that start Spark."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, Any] = {}
        self.failed: list[Any] = []
        self.reports: list[Any] = []
        self.error: Exception | None = None
        self.stops = False
        self.metrics: str | None = None  # of the pipeline that was run
        monkeypatch.setitem(sys.modules, "headwater.pipeline.runner", SimpleNamespace(run=self.run))  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "headwater.pipeline.verify.verify", SimpleNamespace(verify=self.verify))  # type: ignore[arg-type]

    def run(self, spec: Any, *, once: bool, master: str | None, watcher: Any, stop: Any, then_verify: bool) -> Any:
        self.asked |= {"once": once, "master": master}
        self.metrics = spec.metrics
        if self.stops:
            stop.set()
        if self.error is not None:
            raise self.error
        report_run(watcher)
        found = self.verify(spec, repair=False, master=master, watcher=watcher) if then_verify else []
        return SimpleNamespace(is_good=not self.failed and all(each.is_good for each in found))

    def verify(self, spec: Any, *, repair: bool, master: str | None, watcher: Any) -> Any:
        self.asked |= {"repair": repair}
        for report in self.reports:
            watcher.verified(TASK, report)
        return self.reports


def report_run(watcher: Any) -> None:
    """Report the events of a complete run of one table to a watcher."""
    watcher.started(TASK, "first", 1000, 2)
    watcher.stage(TASK, "snapshot")
    watcher.range_moved(TASK, LEFT)
    watcher.range_moved(TASK, RIGHT)
    watcher.loaded(TASK, 1, 600, 2.0)
    watcher.range_moved(TASK, LEFT)
    watcher.range_moved(TASK, replace(RIGHT, stage=LOG, last_offset=20))
    watcher.retrying(TASK, Unavailable("gone for a moment"), 1)
    watcher.stage(TASK, "log")
    watcher.stepped(TASK, 25, 5, 0.5)
    watcher.live(TASK, 25, 27)
    watcher.live(TASK, 25, 27)
    watcher.done(TASK, 27, 1007)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Played:
    monkeypatch.chdir(folder)
    return Played(monkeypatch)


def report(bad: int = 0, repaired: int = 0, error: Exception | None = None, known: bool = True) -> Any:
    good = error is None and bad == repaired
    differing = SimpleNamespace(difference=Difference(1, 0, 2000, ("6", "41", "42")) if known else None)
    return SimpleNamespace(
        db="main", table="orders", offset=27, rows=1000, ranges=[1, 2], bad=[differing] * bad, repaired=repaired,
        is_good=good, error=error,
    )  # fmt: skip


def test_metrics_flag_replaces_the_address_of_the_file(
    play: Played, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "lake.toml").write_text(FILE.replace("[pipeline]", '[pipeline]\nmetrics = "127.0.0.1:9109"'))
    for flags, address in (((), "127.0.0.1:9109"), (("--metrics", "127.0.0.1:9110"), "127.0.0.1:9110")):
        assert main(["pipeline", "run", "lake.toml", *flags]) == 0
        assert play.metrics == address
    capsys.readouterr()
    assert main(["pipeline", "run", "lake.toml", "--metrics", "9109"]) != 0
    assert "--metrics: an address like 127.0.0.1:7171 was expected, not '9109'" in capsys.readouterr().err


def test_run_prints_its_progress_in_lines(play: Played, capsys: pytest.CaptureFixture[str]) -> None:
    play.reports = [report()]
    assert main(["pipeline", "run", "lake.toml", "--once", "--master", "local[2]", "--verify"]) == 0
    assert play.asked == {"once": True, "master": "local[2]", "repair": False}
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "lake: 2 tables of http://127.0.0.1:9, carried by Spark",
        "main.orders: the first snapshot, about 1,000 rows in 2 ranges",
        "main.orders: snapshot: 0 of 1,000 rows",
        "main.orders: tries again: gone for a moment (unavailable, 1 failure in a row)",
        "main.orders: log",
        "main.orders: is at offset 27 after 1,007 rows and changes of this run",
        "main.orders: source and sink are equal: 1,000 rows in 2 ranges at offset 27",
    ]


def test_json_run_prints_an_object_per_event_without_repeats(play: Played, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "run", "lake.toml", "-o", "json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["what"] for line in lines] == [
        "note", "started", "stage", "range", "range", "loaded", "range", "retrying", "stage", "stepped", "live", "done",
    ]  # fmt: skip
    documented = page("docs/pipeline.md").split("`what` (")[1].split(")")[0]
    assert {line["what"] for line in lines} | {"failed", "verified"} == set(
        documented.replace("\n", " ").replace("`", "").split(", ")
    )
    live = lines[-2]
    assert (live["pipeline"], live["db"], live["table"], live["lag"]) == ("lake", "main", "orders", 2)
    assert lines[7]["error"] == {"code": "unavailable", "message": "gone for a moment", "hint": ""}


def test_run_with_a_failed_or_differing_table_exits_with_1(play: Played, capsys: pytest.CaptureFixture[str]) -> None:
    play.failed = [TASK]
    assert main(["pipeline", "run", "lake.toml", "--verify"]) == 1
    play.failed, play.reports = [], [report(), report(bad=1)]
    assert main(["pipeline", "run", "lake.toml", "--verify"]) == 1
    assert main(["pipeline", "verify", "lake.toml"]) == 1
    assert "1 range differed" in capsys.readouterr().err
    play.reports = [report(bad=1, repaired=1)]
    assert main(["pipeline", "verify", "lake.toml", "--repair"]) == 0
    assert capsys.readouterr().out.endswith("\nrepaired: 2,001 rows\n")


@pytest.mark.parametrize("verb", [("run", "--once"), ("verify",)])
def test_unreachable_server_is_reported_within_seconds_and_leaves_no_files(
    ask: Asked, folder: Path, verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert main(["pipeline", verb[0], "lake.toml", *verb[1:]]) == 3
    assert time.monotonic() - began < PATIENCE  # eight failures take ten minutes
    assert re.fullmatch(
        r"error: no server answers at http://127\.0\.0\.1:9: .*refused.* \(unavailable\)\n"
        r"hint: Is `headwater serve` running\? `server` in lake\.toml says http://127\.0\.0\.1:9\n",
        capsys.readouterr().err,
    )
    assert [each.name for each in folder.iterdir()] == ["lake.toml"]


def test_unknown_tables_and_columns_are_refused_before_spark_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        "headwater.pipeline.run.resources.open_session", lambda *_, **__: pytest.fail("Spark was started")
    )
    with served(folder) as server:
        server.sql("CREATE TABLE customers(id INTEGER PRIMARY KEY, name TEXT)")
        text = FILE.replace("http://127.0.0.1:9", server.url).replace('["orders", ', '["custmers", ')
        (folder / "lake.toml").write_text(text.replace("[table.sink]", 'columns = ["nam"]\n\n[table.sink]'))
        assert main(["pipeline", "run", "lake.toml"]) == 1
        with MetaStore.open(read_spec(folder / "lake.toml").meta) as store:
            noted = [(task.table, task.error.partition(":")[0], task.is_owned) for task in store.tasks()]
    said = capsys.readouterr().err
    assert "main.custmers: " in said and "(not_found)" in said
    assert "main.customers: `columns`: table 'customers' has no column 'nam' (invalid_request)\n" in said
    assert "(invalid_request)\nhint: Did you mean 'name'?" in said
    assert noted == [("custmers", "not_found", False), ("customers", "invalid_request", False)]


def test_continuous_run_reports_an_unreachable_server_before_spark_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater.pipeline import runner as running

    told: list[str] = []
    watcher = SimpleNamespace(retrying=lambda task, error, failures: told.append(error.hint))

    def started(*_: object) -> Any:
        raise PipelineError("as far as this")

    monkeypatch.setattr(running, "session_of", started)
    with pytest.raises(PipelineError, match="as far as this"):
        running.run(read_spec(folder / "lake.toml"), watcher=watcher)  # type: ignore[arg-type]
    hint = "Is `headwater serve` running? `server` in the pipeline says http://127.0.0.1:9"
    assert told == [hint, hint]


def test_java_process_ended_by_a_stop_is_not_reported(play: Played, capsys: pytest.CaptureFixture[str]) -> None:
    play.error = ConnectionRefusedError(111, "Connection refused")
    assert main(["pipeline", "run", "lake.toml"]) == 1
    assert "error: Spark's Java process is gone\nhint: It was killed" in capsys.readouterr().err
    play.stops = True
    assert main(["pipeline", "run", "lake.toml"]) == 0
    assert capsys.readouterr().err == ""


def test_spark_error_is_printed_in_a_single_line(play: Played, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = type("AnalysisException", (Exception,), {"__module__": "pyspark.errors"})
    play.error = foreign("[TABLE_NOT_FOUND] no such table\n at org.apache.spark.x\n at org.apache.spark.y")
    assert main(["pipeline", "run", "lake.toml"]) == 1
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == "error: no such table"


def test_missing_package_is_reported_with_its_remedy(play: Played, capsys: pytest.CaptureFixture[str]) -> None:
    play.error = ModuleNotFoundError("No module named 'pyspark'", name="pyspark.sql")
    assert main(["pipeline", "run", "lake.toml"]) == 1
    assert capsys.readouterr().err == (
        "error: pipelines need the package pyspark.sql, which is not installed\nhint: pip install headwater[spark]\n"
    )


def test_pipeline_verbs_without_the_spark_extra_print_an_install_hint(folder: Path) -> None:
    without = "import sys; sys.modules['sqlalchemy'] = None; "
    code = without + "from headwater.cli.main import main; sys.exit(main(sys.argv[1:]))"
    (folder / "headwater-pipeline.db").touch()
    for verb in (["list"], ["status", "lake.toml"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "pipeline", *verb],
            cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and "hint: pip install headwater[spark]" in done.stderr, done.stderr


def test_unreadable_or_wrong_pipeline_file_exits_with_2(ask: Asked, folder: Path) -> None:
    assert "cannot read none.toml" in ask.refused(2, "run", "none.toml")
    (folder / "bad.toml").write_text(FILE.replace("server", "sever"))
    assert "Did you mean server?" in ask.refused(2, "verify", "bad.toml")


def test_command_line_starts_without_loading_spark_or_sqlalchemy() -> None:
    heavy = "{'pyspark', 'sqlalchemy', 'rich'}"
    code = "import sys; from headwater.cli.main import build_parser; build_parser(); "
    code += f"print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout == "[]\n"


# --- shows -----------------------------------------------------------------------------------------------


def test_live_lines_are_printed_every_few_seconds_and_only_with_new_offsets(capsys: pytest.CaptureFixture[str]) -> None:
    clock = SimpleNamespace(now=100.0)
    lines = ProgressLines(lambda: clock.now)
    for second, offset in ((0, 1), (1, 2), (5, 3), (9, 4), (20, 4), (30, 5)):
        clock.now = 100.0 + second
        lines.live(TASK, offset, 5)
    assert [line.split("offset ")[1].split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "1",
        "3",
        "4",
        "5",
    ]


def test_table_failure_is_printed_on_standard_error_with_its_hint(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressLines().failed(TASK, PipelineError("it broke", hint="Mend it."))
    assert capsys.readouterr() == ("", "error: main.orders: it broke (pipeline_failed)\nhint: Mend it.\n")


def test_control_characters_in_a_table_failure_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressLines().failed(replace(TASK, table="x\x1b[2J"), PipelineError("\x1b[31m"))
    assert "\x1b" not in capsys.readouterr().err


def test_tally_counts_rows_pace_and_remaining_time() -> None:
    tally = TableProgress(TASK)
    tally.began(1000)
    tally.stage = "snapshot"
    assert (tally.rows, tally.total, tally.pace, tally.words) == (0, 1000, None, "0 of 1,000 rows")
    assert tally.moved(LEFT) and tally.moved(RIGHT) and not tally.moved(LEFT)
    tally.loaded(600, 2.0)
    assert (tally.rows, tally.pace, tally.seconds_left) == (600, 300.0, pytest.approx(400 / 300))
    assert tally.words == "600 of 1,000 rows, 1 of 2 ranges, 300 rows/s, 1 s left"
    assert tally.active(5) == [RIGHT]
    tally.moved(replace(RIGHT, stage=LOG))
    assert tally.words == "1,000 of 1,000 rows, 2 of 2 ranges"  # no pace, no time left
    tally.stage = "log"
    tally.stepped(25, 5, 0.5)
    tally.latest = 26
    assert tally.words == "at offset 25, 1 change behind, last step 5 changes in 0.5 s"
    tally.latest = 25
    assert tally.words.startswith("at offset 25, nothing is behind")


def test_tally_drops_ranges_replaced_by_a_split_or_merge() -> None:
    tally = TableProgress(TASK)
    for row in (LEFT, RIGHT):
        tally.moved(row)
    tally.moved(replace(RIGHT, range_id=3, epoch=2, span=Span(b"k", b"t"), rows_estimate=300))
    tally.moved(replace(RIGHT, range_id=2, epoch=2, span=Span(b"t"), rows_estimate=100))
    assert (tally.ranges, tally.total) == ((1, 3), 1000)
    tally.moved(replace(LEFT, epoch=3, span=Span.all(), rows_estimate=1000))
    assert (tally.ranges, tally.total, tally.rows) == ((1, 1), 1000, 1000)


def test_tally_without_a_finished_range_shows_no_pace() -> None:
    tally = TableProgress(TASK)
    tally.began(1000)
    tally.stage = "snapshot"
    tally.moved(replace(LEFT, stage=SNAPSHOT))
    tally.loaded(600, 2.0)  # told before the range that is in by it
    assert tally.words == "0 of 1,000 rows"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (42, "42 s"), (59.7, "1 min 0 s"), (185, "3 min 5 s"), (7800, "2 h 10 min")]
)
def test_durations_are_printed_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_bars_show_tables_active_ranges_and_the_live_lag() -> None:
    from rich.console import Console

    out = io.StringIO()
    with ProgressBars(Console(file=out, force_terminal=True, width=140, color_system=None)) as bars:
        bars.started(TASK, "first", 1000, 2)
        bars.stage(TASK, "snapshot")
        bars.loaded(TASK, 1, 600, 2.0)
        bars.range_moved(TASK, LEFT)
        bars.range_moved(TASK, RIGHT)
        bars._progress.refresh()
        reading = out.getvalue()
        bars.range_moved(TASK, replace(RIGHT, stage=LOG))
        bars.stage(TASK, "log")
        bars.live(TASK, 25, 27)
        bars.failed(TASK, PipelineError("it broke [red]now[/red]", hint="Mend it."))
    assert "600 of 1,000 rows, 1 of 2 ranges, 300 rows/s, 1 s left" in reading
    assert "range 2" in reading and "about 400 rows" in reading
    last = out.getvalue().rpartition("main.orders failed")[0] + out.getvalue().rpartition("main.orders log")[2]
    assert "at offset 25, 2 changes behind" in last
    assert "it broke [red]now[/red] (pipeline_failed)" in out.getvalue()


def test_verification_result_is_printed_with_its_differences() -> None:
    assert compared(report(bad=2)).startswith("2 ranges differed: 1,000 rows")
    assert compared(report(bad=1)).splitlines()[1:] == [
        "  rows: 1 missing, 2,000 different in the sink; keys like 6 | 41 | 42",
        "hint: `headwater pipeline verify --repair` repairs them.",
    ]
    assert compared(report(bad=1, repaired=1, known=False)).splitlines()[1:] == ["repaired: 1 range"]
    assert compared(report(error=PipelineError("no"))) == "could not be compared: no (pipeline_failed)"


def test_json_lines_include_the_verification_result(capsys: pytest.CaptureFixture[str]) -> None:
    JsonLines(lambda: 7).verified(TASK, report(bad=1))
    found = json.loads(capsys.readouterr().out)
    assert (found["missing"], found["extra"], found["different"]) == (1, 0, 2000)
    assert found["examples"] == ["6", "41", "42"]
    assert (found["ts_ms"], found["equal"], found["bad"], found["repaired"], found["error"]) == (7, False, 1, 0, None)


def test_progress_bars_are_drawn_on_a_terminal(folder: Path) -> None:
    """A pseudo-terminal replaces a user's terminal."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PLAYED, "patient"],
        cwd=folder, env=environment(TERM="xterm", COLUMNS="120"), stdout=theirs, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while b"working" not in seen:
        seen += os.read(ours, 65536)
    process.send_signal(signal.SIGTERM)
    try:
        while chunk := os.read(ours, 65536):
            seen += chunk
    except OSError:
        pass  # how Linux says that the other side is closed
    finally:
        os.close(ours)
        process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert b"main.customers log" in seen and seen.rstrip().endswith(b"\x1b[?25h")
