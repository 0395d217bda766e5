"""Pipelines from PostgreSQL whose changes are not whole rows: an unknown value is never written as null."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.pipeline.lakes import DELTA, Lake, Watching
from tests.pipeline.pg_all_types_table import PgLive

from headwater.client import Client
from headwater.errors import NotFound, NotSupported, SourceUnfit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCS = "CREATE TABLE docs(id int PRIMARY KEY, body text, n int)"
LARGE = "(SELECT string_agg(md5(x::text), '') FROM generate_series(1, 1000) x)"  # too large for its row, compressed too
PLAIN = "CREATE TABLE plain(id int PRIMARY KEY, n int, f float8)"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., PgLive]]:
    made: list[PgLive] = []

    def start(*statements: str) -> PgLive:
        made.append(PgLive(tmp_path, *statements))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_table_whose_updates_may_omit_values_is_refused_with_the_sql_that_fixes_it(
    spark: SparkSession, serve: Callable[..., PgLive], tmp_path: Path
) -> None:
    source = serve(DOCS, f"INSERT INTO docs VALUES (1, {LARGE}, 1), (2, 'small', 2)")
    lake = Lake(spark, source.live, tmp_path)
    for refused in (lake.spec("docs", sink=f'{DELTA}\nmode = "history"'), lake.spec(docs="where = 'n < 5'")):
        error = lake.failure(refused)
        assert isinstance(error, SourceUnfit) and not (tmp_path / "lake").exists()
    spec = lake.spec("docs")
    remedy = error.hint.removeprefix("Run: ")
    assert remedy == 'ALTER TABLE "public"."docs" REPLICA IDENTITY FULL;'
    source.run("UPDATE docs SET n = 5 WHERE id = 1", remedy)  # that update is in the log, without the large value
    lake.carry(spec)
    source.run("UPDATE docs SET n = 6 WHERE id = 1")
    lake.carry(spec)
    assert lake.is_equal("docs") and lake.verify(spec).is_good
    assert [len(row["body"]) for row in lake.rows("docs")] in ([32_000, 5], [5, 32_000])


SQL = 'kind = "sql"\ntable = "docs"\nurl = "sqlite:///{path}"'
HOSTILE = 'CREATE TABLE docs(id int PRIMARY KEY, body text, n int, "x""body" text, "a,{" jsonb)'


@pytest.mark.soak(seconds=30, every_time=True)
@pytest.mark.parametrize("kind", ["delta", "sql"])
def test_large_value_omitted_by_an_update_is_kept_in_the_sink(
    kind: str, spark: SparkSession, serve: Callable[..., PgLive], tmp_path: Path
) -> None:
    source = serve(
        HOSTILE, f"INSERT INTO docs VALUES (1, {LARGE}, 1, {LARGE}), (2, 'small', 2, NULL), (3, {LARGE}, 3, '')"
    )
    lake = Lake(spark, source.live, tmp_path)
    path = tmp_path / "docs.sqlite"
    spec = lake.spec("docs", sink=DELTA if kind == "delta" else SQL.format(path=path))
    lake.carry(spec)

    def held() -> list[tuple[object, ...]]:
        if kind == "sql":
            with closing(sqlite3.connect(path)) as sink:
                return sink.execute('SELECT id, body, n, "x""body", "a,{", _misfit FROM docs ORDER BY id').fetchall()
        return sorted(tuple(row.values()) for row in lake.rows("docs"))

    def wanted() -> list[tuple[object, ...]]:
        return source.db.execute('SELECT id, body, n, "x""body", "a,{"::text, NULL FROM docs ORDER BY id').fetchall()

    steps = (
        ["UPDATE docs SET n = 5 WHERE id = 1"],  # two are in the sink
        ["UPDATE docs SET body = upper(body) WHERE id = 3", "UPDATE docs SET n = 9 WHERE id = 3"],  # one in the step
        ["UPDATE docs SET body = NULL WHERE id = 1", "UPDATE docs SET n = 6"],  # null is no value that was left out
        [f"INSERT INTO docs VALUES (4, {LARGE}, 4)", "UPDATE docs SET n = 5 WHERE id = 4"],
        [
            "DELETE FROM docs WHERE id = 4",
            "INSERT INTO docs VALUES (4, 'small', 4)",
            "UPDATE docs SET n = 5 WHERE id = 4",
        ],
        [f'UPDATE docs SET "a,{{" = to_jsonb({LARGE}) WHERE id = 2', "UPDATE docs SET n = -n WHERE id < 3"],
        ["UPDATE docs SET n = 0", "DELETE FROM docs WHERE id = 3"],
    )
    for step in steps:
        watcher = Watching()
        source.run(*step)
        lake.carry(spec, watcher)
        assert watcher.reasons == [], step
        assert held() == wanted(), step
    source.run(f"INSERT INTO docs VALUES (3, 'small', 3), (5, {LARGE}, 5)")
    lake.carry(spec)
    moves = (
        ["UPDATE docs SET id = 10 WHERE id = 1"],  # the value stands under another key
        [  # and under its new one stood another
            "UPDATE docs SET body = upper(body) WHERE id = 3",
            "DELETE FROM docs WHERE id = 3",
            "UPDATE docs SET id = 3 WHERE id = 5",
        ],
    )
    for move in moves:
        watcher = Watching()
        source.run(*move)
        lake.carry(spec, watcher)
        assert watcher.reasons == ["values_unavailable"], move
        assert held() == wanted() and lake.verify(spec).is_good, move


def test_table_with_unchanged_toast_between_runs_is_resnapshotted(
    spark: SparkSession, serve: Callable[..., PgLive], tmp_path: Path
) -> None:
    full = "ALTER TABLE docs REPLICA IDENTITY FULL"
    source = serve(DOCS, full, f"INSERT INTO docs VALUES (1, {LARGE}, 1), (2, 'small', 2)")
    lake = Lake(spark, source.live, tmp_path)
    spec = lake.spec("docs")
    lake.carry(spec)
    source.run("ALTER TABLE docs REPLICA IDENTITY DEFAULT", "UPDATE docs SET n = 7", full, "UPDATE docs SET n = n + 1")
    watcher = Watching()
    lake.carry(spec, watcher)
    assert watcher.reasons in (["values_unavailable"], ["schema_changed"])
    assert lake.is_equal("docs") and lake.verify(spec).is_good
    assert all(row["body"] and row["_misfit"] is None for row in lake.rows("docs"))


def test_table_with_key_only_old_rows_is_carried_during_writes(
    spark: SparkSession, serve: Callable[..., PgLive], tmp_path: Path
) -> None:
    source = serve(PLAIN, "INSERT INTO plain SELECT i, i, i FROM generate_series(1, 100) i")
    lake = Lake(spark, source.live, tmp_path)
    spec = lake.spec("plain")
    writes = iter(range(3))

    class Writing(Watching):
        """Writes before the first read of rows, after its offset was taken."""

        def stage(self, task: object, stage: str) -> None:
            if next(writes, None) is not None:
                source.run("UPDATE plain SET n = n + 1 WHERE id % 7 = 0", "DELETE FROM plain WHERE id % 50 = 3")
                source.run("UPDATE plain SET id = -id WHERE id = 9")

    lake.carry(spec, Writing())
    source.run(
        "UPDATE plain SET n = 0 WHERE id = 5", "DELETE FROM plain WHERE id = 6", "INSERT INTO plain VALUES (500)"
    )
    lake.carry(spec)
    assert lake.is_equal("plain") and lake.verify(spec).is_good


def test_snapshot_read_racing_with_a_write_is_repeated(
    spark: SparkSession, serve: Callable[..., PgLive], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = serve(PLAIN, "INSERT INTO plain SELECT i, i, i FROM generate_series(1, 100) i")
    lake = Lake(spark, source.live, tmp_path)
    original, races = Client.register, iter((False, True))  # the first one begins the plan, the second reads

    def late(self: Client, *args: object, **more: object) -> object:
        found = original(self, *args, **more)  # type: ignore[arg-type]
        if next(races, False):
            source.run("UPDATE plain SET n = n + 1")  # between the offset and the read
        return found

    monkeypatch.setattr(Client, "register", late)
    watcher = Watching()
    lake.carry(lake.spec("plain"), watcher)
    assert [type(error) for error in watcher.errors] == [NotSupported]
    assert lake.is_equal("plain")


def test_table_altered_twice_before_its_next_row_keeps_all_columns(
    spark: SparkSession, serve: Callable[..., PgLive], tmp_path: Path
) -> None:
    source = serve(PLAIN, "ALTER TABLE plain REPLICA IDENTITY FULL", "INSERT INTO plain VALUES (1, 1, 1)")
    lake = Lake(spark, source.live, tmp_path)
    spec = lake.spec("plain")
    lake.carry(spec)
    source.run("ALTER TABLE plain ADD COLUMN one text")
    lake.carry(spec)
    source.run("ALTER TABLE plain ADD COLUMN two text")
    lake.carry(spec)
    source.run("UPDATE plain SET one = 'a', two = 'b'", "INSERT INTO plain VALUES (2, 2, 2, 'c', 'd')")
    lake.carry(spec)
    assert lake.is_equal("plain") and lake.verify(spec).is_good
    assert {row["two"] for row in lake.rows("plain")} == {"b", "d"}


def test_table_without_a_key_is_refused_with_a_remedy(
    spark: SparkSession, serve: Callable[..., PgLive], tmp_path: Path
) -> None:
    source = serve(
        "CREATE TABLE bare(x int)",
        "CREATE TABLE whole(x int)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "CREATE TABLE chosen(x int NOT NULL UNIQUE, y int)",
        "ALTER TABLE chosen REPLICA IDENTITY USING INDEX chosen_x_key",
        "INSERT INTO bare VALUES (1), (1)",
        "INSERT INTO whole VALUES (1), (1)",
        "INSERT INTO chosen VALUES (1, 1), (2, 2)",
    )
    lake = Lake(spark, source.live, tmp_path)
    assert isinstance(
        lake.failure(lake.spec("bare")), NotFound
    )  # PostgreSQL would refuse its updates if it were published
    error = lake.failure(lake.spec("whole"))
    assert isinstance(error, NotSupported) and "primary key" in error.message + error.hint, error
    assert source.live.error("pull.ranges", table="whole")["code"] == "not_supported"
    lake.carry(lake.spec("chosen"))
    source.run("UPDATE chosen SET y = 5 WHERE x = 1", "UPDATE chosen SET x = 3 WHERE x = 2")
    lake.carry(lake.spec("chosen"))
    assert lake.is_equal("chosen")
