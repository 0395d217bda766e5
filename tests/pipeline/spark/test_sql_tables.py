"""Tables in Spark's catalog, created by CREATE TABLE … USING headwater, return the rows of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conformance.live_server import Live

from headwater.client import Client
from headwater.errors import ConfigError, SchemaChanged
from headwater.pipeline.failure import cause_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Catalog:
    """A database in the catalog of Spark; `{db}` in a statement is its name."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark, self._db = spark, "sql_tables"
        spark.sql(f"CREATE DATABASE {self._db} LOCATION '{folder}'")

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Run one statement; return its rows in order."""
        return sorted(tuple(row) for row in self._spark.sql(statement.replace("{db}", self._db)).collect())

    def refusal(self, statement: str) -> Exception:
        """Return our error for a statement that fails."""
        with pytest.raises(Exception) as caught:
            self.sql(statement)
        return cause_of(caught.value)

    def drop(self) -> None:
        self._spark.sql(f"DROP DATABASE {self._db} CASCADE")


@pytest.fixture
def catalog(spark: SparkSession, own_catalog: None, tmp_path: Path) -> Iterator[Catalog]:
    created = Catalog(spark, tmp_path / "catalog")
    yield created
    created.drop()


def test_table_created_by_sql_returns_the_current_rows_of_the_server(catalog: Catalog, server: Live) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, n INTEGER)")
    server.sql("INSERT INTO t VALUES (1, 'a', 10), (2, 'b', 20), (3, NULL, 30)")
    with Client(server.url) as client:
        before = client.describe("main", "t").latest
    catalog.sql(
        f"CREATE TABLE {{db}}.t USING headwater OPTIONS (url '{server.url}', `table` 't', rangeBytes '1')"
        " COMMENT 'of the shop' TBLPROPERTIES (team = 'lake')"
    )
    every = [(1, "a", 10, None), (2, "b", 20, None), (3, None, 30, None)]
    assert catalog.sql("SELECT * FROM {db}.t") == every
    assert catalog.sql("SELECT v FROM {db}.t WHERE n >= 20 AND v IS NOT NULL") == [("b",)]
    assert catalog.sql("SELECT a.id, b.n FROM {db}.t a JOIN {db}.t b ON a.id = b.id WHERE a.n < 30 AND b.n > 10") == [
        (2, 20)
    ]
    server.sql("DELETE FROM t WHERE id = 1")
    assert catalog.sql("SELECT id FROM {db}.t") == [(2,), (3,)]
    assert catalog.sql(f"SELECT id FROM {{db}}.t WITH (version = {before})") == [(1,), (2,), (3,)]


def test_table_created_by_sql_keeps_all_its_options(catalog: Catalog, server: Live) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, n INTEGER)")
    server.sql("INSERT INTO t VALUES (1, 'a', 10), (2, 'b', 20)")
    options = f"url '{server.url}', `table` 't'"
    catalog.sql(f"CREATE TABLE {{db}}.some USING headwater OPTIONS ({options}, columns 'n', where 'n > 10')")
    assert catalog.sql("SELECT * FROM {db}.some") == [(2, 20, None)]
    catalog.sql(f"CREATE TABLE {{db}}.changes USING headwater OPTIONS ({options}, startingOffset 'earliest')")
    assert catalog.sql("SELECT id, _change_type FROM {db}.changes") == [(1, "insert"), (2, "insert")]


def test_statement_with_wrong_options_or_with_columns_is_refused(catalog: Catalog, server: Live) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    options = f"url '{server.url}', `table` 't'"
    wrong = catalog.refusal("CREATE TABLE {db}.a USING headwater OPTIONS (url 'http://h', tabel 't')")
    assert isinstance(wrong, ConfigError) and "unknown option 'tabel'" in wrong.message
    secret = catalog.refusal(f"CREATE TABLE {{db}}.a USING headwater OPTIONS ({options}, token 's3cret')")
    assert isinstance(secret, ConfigError) and "s3cret" not in str(secret)
    catalog.sql(f"CREATE TABLE {{db}}.b (id BIGINT) USING headwater OPTIONS ({options})")
    lost = catalog.refusal("SELECT * FROM {db}.b")
    assert isinstance(lost, ConfigError) and "without columns" in lost.hint


def test_column_dropped_after_the_statement_is_an_error(catalog: Catalog, server: Live) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    server.sql("INSERT INTO t VALUES (1, 'a')")
    catalog.sql(f"CREATE TABLE {{db}}.t USING headwater OPTIONS (url '{server.url}', `table` 't')")
    server.sql("ALTER TABLE t ADD COLUMN w TEXT")
    assert catalog.sql("SELECT * FROM {db}.t") == [(1, "a", None)]
    server.sql("ALTER TABLE t DROP COLUMN v")
    assert isinstance(catalog.refusal("SELECT * FROM {db}.t"), SchemaChanged)


def test_temporary_view_created_by_sql_keeps_its_offset(spark: SparkSession, server: Live) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
    server.sql("INSERT INTO t VALUES (1, 'a')")
    spark.sql(f"CREATE TEMPORARY VIEW seen USING headwater OPTIONS (url '{server.url}', `table` 't')")
    try:
        server.sql("INSERT INTO t VALUES (2, 'b')")
        for _ in range(2):
            assert [tuple(row) for row in spark.sql("SELECT id, v FROM seen").collect()] == [(1, "a")]
    finally:
        spark.sql("DROP VIEW seen")
