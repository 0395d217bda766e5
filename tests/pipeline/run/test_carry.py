"""A whole pipeline with a real server and real Spark: whatever fails meanwhile, the lake ends equal to the table."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.conformance.live_server import Live
from tests.pipeline.lakes import Lake, Watching, break_at, fill
from tests.sources.sqlite_writer_process import Foreign

from headwater.client import Client, Described, Registered
from headwater.errors import Conflict, NotFound, PipelineError, SinkUnfit
from headwater.pipeline import runner as running
from headwater.pipeline.run import carry, resources
from headwater.pipeline.run.spec import spec_of
from headwater.pipeline.sinks.sink import Step

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = "CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)"


def test_changes_made_while_the_snapshot_is_read_are_neither_lost_nor_doubled(lake: Lake, server: Live) -> None:
    server.sql(T)
    fill(server, 100)

    def before_the_first_load() -> None:
        server.sql("UPDATE t SET v = 'early' WHERE id % 10 = 3")
        server.sql("DELETE FROM t WHERE id % 10 = 4")

    def between_two_loads() -> None:
        server.sql("UPDATE t SET id = id + 1000 WHERE id IN (1, 2, 55)")
        server.sql("UPDATE t SET id = id - 100 WHERE id IN (99, 100)")
        server.together(
            "UPDATE t SET id = -7 WHERE id = 7",
            "UPDATE t SET id = 7 WHERE id = 87",
            "UPDATE t SET id = 87 WHERE id = -7",
        )
        server.sql("DELETE FROM t WHERE id IN (5, 95)")
        server.sql("INSERT INTO t VALUES (5, 'again'), (500, 'new')")

    watcher = Watching(started=before_the_first_load, loaded=between_two_loads)
    lake.carry(watcher=watcher)
    assert watcher.reasons == ["first"] and len(watcher.loads) > 1
    assert lake.is_equal()
    server.sql("UPDATE t SET v = 'late' WHERE id = 3")
    watcher = Watching()
    assert lake.carry(watcher=watcher).rows == 1 and watcher.loads == []  # two images, one change
    assert lake.is_equal()
    assert lake.carry(watcher=watcher).rows == 0


def test_jobs_of_each_table_run_in_a_scheduler_pool_of_its_own(lake: Lake, server: Live) -> None:
    server.sql(T)
    server.sql("CREATE TABLE u (id INTEGER PRIMARY KEY, v TEXT)")
    fill(server, 10)
    fill(server, 10, table="u")
    assert lake.run(lake.spec("t", "u")).is_good
    context: Any = lake.spark.sparkContext._jsc.sc()
    assert all(context.getPoolForName(f"lake: main.{name}").isDefined() for name in ("t", "u"))


def test_run_once_waits_until_the_log_has_the_commits_from_before_it(
    lake: Lake, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.sql(T)
    fill(server, 5)
    old = lake.carry().offset
    fill(server, 5, first=50)
    describe, calls = Client.describe, itertools.count()

    def behind(*args: Any, **named: Any) -> Described:
        found = describe(*args, **named)
        return msgspec.structs.replace(found, latest=old, caught_up=False) if next(calls) < 4 else found

    monkeypatch.setattr(Client, "describe", behind)
    lake.carry()
    assert next(calls) > 4 and lake.is_equal()


def test_run_once_fails_if_the_log_stays_behind(lake: Lake, server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    server.sql(T)
    fill(server, 5)
    describe = Client.describe
    monkeypatch.setattr(
        Client, "describe", lambda *args, **named: msgspec.structs.replace(describe(*args, **named), caught_up=False)
    )
    monkeypatch.setattr(carry, "BEHIND_SECONDS", 0.0)
    assert "is behind its database" in lake.failure().message
    assert lake.is_equal()  # what the log has is carried


def ranges(server: Live) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.ok("pull.ranges", table="t")["ranges"]
    return found


def divide(server: Live) -> None:
    """Split the first range and the last, merge two between."""
    _, second, third, *_, last = ranges(server)
    one, two = ({"id": each["id"], "epoch": each["epoch"]} for each in (second, third))
    server.ok("pull.merge", table="t", ranges=[one, two])
    for each in (ranges(server)[0], last):
        server.ok("pull.split", table="t", range=each["id"], epoch=each["epoch"])


def test_ranges_split_and_merged_during_snapshot_and_log_skip_no_key(lake: Lake, server: Live) -> None:
    server.sql(T)
    fill(server, 100)
    watcher = Watching(loaded=lambda: divide(server))
    lake.carry(watcher=watcher)
    before = next(row for row in watcher.moves if row.stage == "log")  # of the first wave
    told = {(row.range_id, row.epoch): row for row in reversed(watcher.moves)}  # as they were seen first
    new = [told[each["id"], each["epoch"]] for each in ranges(server) if each["epoch"] > 1]
    assert [row.stage for row in new] == ["log", "log", "snapshot", "snapshot", "snapshot"]
    assert {row.version for row in new} == {before.version}
    first, second, merged, left, right = new
    assert (first.span.start, second.span.end) == (b"", merged.span.start)
    assert merged.span.start < merged.last_key < (merged.span.end or b"")  # of one parent; the other is missing
    assert (left.last_key, right.last_key) == (left.span.start, right.span.start)
    assert lake.is_equal()
    fill(server, 6, first=1000)
    server.sql("UPDATE t SET id = id + 300 WHERE id % 9 = 0")
    watcher = Watching(stepped=lambda: divide(server))
    lake.carry(lake.spec(pipeline="step_rows = 5"), watcher)
    assert len(watcher.steps) > 2
    assert lake.is_equal()
    progress = lake.progress()
    assert {(row.stage, row.last_offset) for row in progress} == {("log", lake.carry().offset)}
    assert [(row.range_id, row.epoch) for row in progress] == [(each["id"], each["epoch"]) for each in ranges(server)]


@pytest.mark.parametrize("split", [True, False], ids=["ranges of an owner", "no ranges yet"])
def test_pipeline_with_a_viewer_key_reads_the_existing_ranges(spark: SparkSession, tmp_path: Path, split: bool) -> None:
    server = Live(tmp_path / "data", serve={"auth": True, "token": "of-the-owner"})
    try:
        server.sql(T)
        fill(server, 100)
        made = len(server.ok("pull.ranges", table="t", target_bytes=1000)["ranges"]) if split else 1
        key = server.ok("security.token.create", name="lake", role="viewer")["token"]
        (tmp_path / "token").write_text(key)
        lake, watcher = Lake(spark, server, tmp_path), Watching()
        spec = lake.spec(pipeline='token_file = "token"')
        lake.carry(spec, watcher)
        assert watcher.reasons == ["first"] and sum(watcher.loads) == 100
        assert len(lake.progress()) == len(ranges(server)) == made and (made > 1) is split
        server.sql("UPDATE t SET v = 'late' WHERE id % 7 = 0")
        lake.carry(spec)
        assert {row["id"] for row in lake.rows() if row["v"] == "late"} == {n for n in range(1, 101) if n % 7 == 0}
        assert lake.verify(spec).is_good
    finally:
        server.stop()


def test_run_cut_off_anywhere_is_resumed_from_the_state_of_the_sink(lake: Lake, server: Live, tmp_path: Path) -> None:
    server.sql(T)
    fill(server, 100)
    loads: list[int] = []
    for point in ("before begin", "after begin", "before load", "after load", "before apply", "after apply"):
        server.sql("UPDATE t SET v = ? WHERE id % 11 = 0", point)
        watcher = Watching()
        with pytest.MonkeyPatch.context() as patch:
            break_at(patch, point)
            error = lake.failure(watcher=watcher)
        assert isinstance(error, PipelineError) and point in error.message
        assert point in lake.task().error
        loads += watcher.loads
    lake.carry()
    assert 0 < sum(loads) < 60  # of the second wave alone: the first was in when its run broke
    assert lake.is_equal()
    version = lake.table().version()
    (tmp_path / "headwater-pipeline.db").unlink()
    watcher = Watching()
    assert lake.carry(watcher=watcher).rows == 0
    assert (watcher.reasons, lake.table().version()) == ([], version)
    assert {row.stage for row in lake.progress()} == {"log"}


def test_sink_behind_the_log_horizon_is_resnapshotted_or_with_on_lost_fail_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    server = Live(tmp_path / "data", log={"retention_events": 5})
    lake = Lake(spark, server, tmp_path)
    try:
        server.sql(T)
        fill(server, 3)
        carried = lake.carry().offset
        fill(server, 20, first=10)
        server.until(lambda: server.app.database("main").log.horizon > carried + 1)  # the log is trimmed later
        strict = lake.spec(t='on_lost = "fail"')
        error = lake.failure(strict)
        assert "wal_horizon_exceeded" in error.message and "wal_horizon_exceeded" in lake.task().error
        assert {row.stage for row in lake.progress()} == {"failed"}
        watcher = Watching()
        lake.carry(watcher=watcher)
        assert watcher.reasons == ["wal_horizon_exceeded"] and lake.is_equal()
        assert lake.task().error == ""

        server.stop()
        for path in Path(server.config.data).glob("main.*"):
            path.unlink()
        server.start()
        server.sql(T)
        fill(server, 2, first=70)
        assert "log_generation_changed" in lake.failure(lake.spec(t='on_lost = "fail"')).message
        watcher = Watching()
        lake.carry(watcher=watcher)
        assert watcher.reasons == ["log_generation_changed"] and lake.is_equal()
    finally:
        server.stop()


def test_changes_of_other_tables_make_no_step_and_no_new_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    server = Live(tmp_path / "data", log={"retention_events": 500})
    lake = Lake(spark, server, tmp_path)
    try:
        server.sql(T)
        server.sql("CREATE TABLE busy (id INTEGER PRIMARY KEY, v TEXT)")
        fill(server, 3)
        carried, version = lake.carry().offset, lake.table().version()
        fill(server, 20, table="busy")
        watcher = Watching()
        assert (lake.carry(watcher=watcher).offset, lake.table().version()) == (carried, version)
        assert (watcher.reasons, watcher.steps) == ([], [])
        fill(server, 1000, first=100, table="busy")
        server.until(lambda: server.app.database("main").log.horizon > carried + 1)
        assert lake.verify().is_good
        done = lake.carry(watcher=watcher)
        assert done.offset > carried and done.rows == 0 and watcher.reasons == []
        assert lake.is_equal() and lake.verify().is_good
        fill(server, 2, first=50)
        assert lake.carry(watcher=watcher).rows == 2 and watcher.reasons == [] and lake.is_equal()
    finally:
        server.stop()


class Late(Client):
    """A client that alters the table between the decision to load and the registered version."""

    server: Live

    def register(self, *args: Any, **more: Any) -> Registered:
        if more.get("keep") is not None:
            self.server.sql("ALTER TABLE t ADD COLUMN w TEXT")
            self.server.sql("UPDATE t SET w = 'now' WHERE id = 99")
            Late.register = Client.register  # type: ignore[method-assign]
        return super().register(*args, **more)


def test_schema_change_during_a_snapshot_loses_no_value(
    lake: Lake, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.sql(T)
    fill(server, 60)
    fill(server, 1, first=99)
    Late.server = server
    monkeypatch.setattr(carry, "Client", Late)
    watcher = Watching(started=lambda: server.sql("ALTER TABLE t ADD COLUMN u TEXT DEFAULT 'u'"))
    lake.carry(lake.spec(t='on_lost = "fail"'), watcher)  # an unfinished snapshot may be begun anew all the same
    assert watcher.reasons == ["first", "schema_changed", "schema_changed"]
    assert lake.is_equal() and lake.rows()[-1]["w"] == "now"


def test_table_rebuilt_by_another_process_is_resnapshotted_and_a_dropped_one_fails(
    lake: Lake, server: Live, foreign_process: Foreign
) -> None:
    server.sql(T)
    fill(server, 20)
    lake.carry()
    shape = server.ok("pull.describe", table="t")["table"]["version"]
    foreign_process.open(Path(server.config.data) / "main.db")
    triggers = foreign_process.run("SELECT sql FROM sqlite_schema WHERE type = 'trigger' ORDER BY rowid")
    foreign_process.script(
        "BEGIN",
        "CREATE TABLE new_t (id INTEGER PRIMARY KEY, v TEXT, extra DEFAULT 7)",
        "INSERT INTO new_t (id, v) SELECT id, upper(v) FROM t WHERE id < 10",
        "DROP TABLE t",
        "ALTER TABLE new_t RENAME TO t",
        *(text.decode() for (text,) in triggers),
        "COMMIT",
    )
    foreign_process.close()
    server.until(lambda: server.ok("pull.describe", table="t")["table"]["version"] != shape)  # the server saw it
    watcher = Watching()
    lake.carry(watcher=watcher)
    assert watcher.reasons == ["schema_changed"] and lake.is_equal() and len(lake.rows()) == 9
    server.sql("DROP TABLE t")
    assert isinstance(lake.failure(), NotFound)
    assert lake.task().error.startswith("not_found")


def test_snapshot_lost_on_every_attempt_ends_the_run_with_its_error(
    lake: Lake, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.sql(T)
    monkeypatch.setattr(carry, "ATTEMPTS", 3)
    lost = Conflict("never the same", resnapshot_reason="schema_changed")
    break_at(monkeypatch, "before load", lost)
    watcher = Watching()
    assert lake.failure(watcher=watcher) is lost
    assert watcher.reasons == ["first", "schema_changed", "schema_changed"]


def test_every_kind_of_key_and_value_is_carried_and_verified(lake: Lake, server: Live) -> None:
    tables = {
        "nokey": "(v TEXT)",
        "both": "(a TEXT, b INTEGER, v REAL, PRIMARY KEY (a, b))",
        "blobs": "(k BLOB PRIMARY KEY, v BLOB)",
        "folded": "(k TEXT COLLATE NOCASE PRIMARY KEY, v TEXT)",
        "bare": "(id INTEGER PRIMARY KEY, v TEXT)",
        "odd": "(id INTEGER PRIMARY KEY, i INTEGER, r REAL, s TEXT, b BLOB, d DECIMAL(9, 3), u BIGINT UNSIGNED,"
        ' j JSON, "a.b `c" TEXT, _offset INTEGER, _hash TEXT, o BOOLEAN)',
    }
    for name, columns in tables.items():
        server.sql(f"CREATE TABLE {name} {columns}")
    for first in range(0, 60, 20):
        keys = range(first, first + 20)
        server.sql("INSERT INTO nokey VALUES " + ",".join(f"('{n % 7}')" for n in keys))
        server.sql("INSERT INTO both VALUES " + ",".join(f"('ä{n % 5}', {n}, {n / 8})" for n in keys))
        server.sql("INSERT INTO blobs VALUES " + ",".join(f"(x'{n:02x}ff00', x'{n:02x}')" for n in keys))
        server.sql("INSERT INTO folded VALUES " + ",".join(f"('{'aB'[n % 2]}{n}', 'v')" for n in keys))
    server.sql("INSERT INTO odd (id) VALUES (1), (9)")
    server.sql("INSERT INTO odd (id, i, r, s) VALUES (2, 9223372036854775807, 9e999, ?)", "snö \U0001f40d ' \" \n")
    server.sql("INSERT INTO odd (id, i, u, o) VALUES (3, 'not a number', 18446744073709551615, 2)")
    server.sql("INSERT INTO odd VALUES (4, -1, -0.0, '', x'00ff', 1.25, 7, '{\"a\": 1}', 'odd', 5, 'h', 1)")
    spec = lake.spec(*tables)
    assert lake.run(spec).is_good
    assert all(lake.is_equal(name) for name in tables)

    server.sql("DELETE FROM nokey WHERE rowid IN (3, 50)")
    server.sql("UPDATE both SET b = b + 100, v = NULL WHERE a = 'ä3'")
    server.sql("UPDATE blobs SET k = x'05ff' WHERE k = x'05ff00'")
    server.sql("UPDATE folded SET k = upper(k) WHERE k LIKE 'a1%'")
    server.sql("INSERT INTO bare VALUES (1, 'something')")
    server.sql("UPDATE odd SET i = 'still none', s = x'00', _offset = 9, _hash = 'g' WHERE id > 2")
    summary = lake.run(spec, then_verify=True)
    assert summary.is_good, [(each.table, each.error, each.bad) for each in summary.reports]
    assert all(lake.is_equal(name) for name in tables)
    compared = {report.table: len(report.ranges) for report in summary.reports}
    assert compared["folded"] == 1 and min(compared[name] for name in ("nokey", "both", "blobs")) > 1


def test_pipeline_with_columns_and_where_carries_only_those_columns_and_rows(lake: Lake, server: Live) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v INTEGER, w TEXT, x TEXT)")
    server.sql("INSERT INTO t VALUES (1, 5, 'a', 'x'), (2, 10, 'b', 'x'), (3, 20, 'c', 'x'), (4, 30, 'd', 'x')")
    some = {"t": 'columns = ["w"]\nwhere = "v >= 10"'}
    lake.carry(lake.spec(**some))
    server.sql("UPDATE t SET v = 15 WHERE id = 1")  # comes in
    server.sql("UPDATE t SET v = 1 WHERE id = 2")  # leaves
    server.sql("UPDATE t SET w = 'C', id = 33 WHERE id = 3")
    server.sql("ALTER TABLE t DROP COLUMN x")  # is not carried
    server.sql("UPDATE t SET w = 'D' WHERE id = 4")
    (report,) = lake.run(lake.spec(**some), then_verify=True).reports
    assert report.is_good and report.rows == 3, report
    held = [(row["id"], row["w"]) for row in lake.rows()]
    assert held == [(1, "a"), (33, "C"), (4, "D")] and set(lake.rows()[0]) == {"id", "w", "_misfit"}
    assert "other columns" in lake.failure(lake.spec(t='columns = ["v"]')).message
    server.sql("CREATE TABLE u (id INTEGER PRIMARY KEY, v INTEGER)")
    assert "no column 'z'" in lake.failure(lake.spec(u='columns = ["z"]')).message


@pytest.mark.parametrize("sink", ['kind = "kafka"\nservers = "x:1"\ntopic = "t"', 'kind = "foreach"\nfunction = "a:b"'])
def test_exactly_once_on_an_unfit_sink_is_refused_before_spark_starts(
    sink: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "open_session", None)
    text = f'[pipeline]\nname = "p"\n[[table]]\ntable = "t"\n[table.sink]\n{sink}\n'
    with pytest.raises(SinkUnfit, match="exactly-once"):
        running.run(spec_of(tomllib.loads(text), tmp_path, "test", {}))
    assert not list(tmp_path.iterdir())


taken: list[tuple[Any, list[tuple[Any, ...]]]] = []


def take(frame: DataFrame, work: Any, table: Any) -> None:
    """A foreach function as a pipeline file names it."""
    names = ["_change_type", "id", "v"] if isinstance(work, Step) else ["id", "v"]
    taken.append((work, sorted(tuple(row) for row in frame.select(*names).collect())))


def test_foreach_function_receives_all_rows_then_every_change(lake: Lake, server: Live) -> None:
    taken.clear()
    server.sql(T)
    fill(server, 50)
    sink = 'kind = "foreach"\nfunction = "' + __name__ + ':take"'
    spec = lake.spec(pipeline='guarantee = "at-least-once"', sink=sink)
    lake.carry(spec)
    server.sql("UPDATE t SET v = 'new' WHERE id = 1")
    server.sql("DELETE FROM t WHERE id = 2")
    assert lake.carry(spec).rows == 2  # an update is one change
    *loads, (step, changes) = taken
    assert sorted(row for _, rows in loads for row in rows) == [(n, f"v{n}") for n in range(1, 51)]
    assert isinstance(step, Step)
    assert changes == [("delete", 2, "v2"), ("update_postimage", 1, "new"), ("update_preimage", 1, "v1")]
    assert lake.verify(spec).error is not None  # it keeps no rows
