"""Virtual tables named only by USING or NATURAL: every scope check and every cached answer must include them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.sources.sqlite.query.shop_analysis import opened, run, settle

from headwater.sources.sqlite.query.analysis import authorizer_reads
from headwater.sources.sqlite.source import SqliteSource

SCHEMA = (
    "CREATE TABLE t(id INTEGER PRIMARY KEY, a TEXT, Notes TEXT)",
    "INSERT INTO t VALUES (1, 'x', 'n'), (2, 'y', 'n')",
    "CREATE VIRTUAL TABLE Notes USING fts5(body)",
    "CREATE VIRTUAL TABLE n2 USING fts5(a)",
    "CREATE VIRTUAL TABLE geo USING rtree(id, x0, x1)",
    "CREATE VIEW joined AS SELECT id FROM t JOIN n2 USING (a)",
)
UNUSED = "(SELECT value FROM json_each('[]')) AS z"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    folder: Path = tmp_path_factory.mktemp("virtual")
    with opened(folder, SCHEMA) as made:
        settle(made)
        yield made


@pytest.mark.parametrize(
    ("sql", "name"),
    [
        ("SELECT id, a FROM t JOIN n2 USING (a)", "n2"),
        ("SELECT id FROM t NATURAL JOIN n2", "n2"),
        ("SELECT id FROM t NATURAL JOIN geo", "geo"),
        ("SELECT id FROM t JOIN [GEO] USING (id)", "geo"),
        ("SELECT id FROM t JOIN 'n2' USING (a)", "n2"),
        ("SELECT id FROM joined", "n2"),
        (f"SELECT 1 FROM (SELECT 'a*' AS notes, {UNUSED}) JOIN notes USING (notes)", "Notes"),
        (f"SELECT 1 FROM (SELECT 7 AS id, {UNUSED}) JOIN geo USING (id)", "geo"),
        (f"SELECT 1 FROM (SELECT 't' AS name, {UNUSED}) JOIN pragma_table_list USING (name)", "pragma_table_list"),
        (f"SELECT 1 FROM (SELECT 't' AS name, {UNUSED}) JOIN dbstat USING (name)", "dbstat"),
        (
            f"SELECT p FROM (SELECT value AS p, value||'*' AS notes, {UNUSED} FROM"
            " (SELECT 'aa' AS value UNION ALL SELECT '77')) JOIN notes USING (notes)",
            "Notes",
        ),
    ],
)
def test_virtual_table_that_only_a_join_names_is_found(source: SqliteSource, sql: str, name: str) -> None:
    found = source.analyse(sql)
    assert name in found.beyond
    assert any(name in reason for reason in found.unseen)
    assert not found.is_cacheable


def test_virtual_table_of_unknown_name_is_out_of_scope(source: SqliteSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorizer_reads, "_candidates", lambda reader, texts: {})
    found = source.analyse("SELECT id, a FROM t JOIN n2 USING (a)")
    assert found.beyond == (authorizer_reads.UNKNOWN_VIRTUAL_TABLE,)
    assert not found.is_cacheable


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT t.id, value FROM t, json_each('[1]')",
        "SELECT notes, value FROM t, json_each('[1]') AS n2",
        "SELECT id AS geo, notes FROM t",
    ],
)
def test_names_of_virtual_tables_that_are_not_opened_do_not_count(source: SqliteSource, sql: str) -> None:
    found = source.analyse(sql)
    assert found.beyond == ()
    assert found.is_cacheable


def test_named_virtual_table_is_reported_once_as_the_schema_writes_it(source: SqliteSource) -> None:
    assert source.analyse("SELECT body FROM NOTES").beyond == ("Notes",)


@pytest.mark.parametrize("name", ["json_each", "JSON_Tree"])
@pytest.mark.parametrize(
    ("module", "row"), [("fts4(value)", "'s'"), ("fts5(value)", "'s'"), ("rtree(value, a, b)", "1, 2, 3")]
)
def test_virtual_table_with_the_name_of_a_json_function_is_beyond_the_tables(
    tmp_path: Path, name: str, module: str, row: str
) -> None:
    schema = (*SCHEMA, f"CREATE VIRTUAL TABLE {name} USING {module}", f"INSERT INTO {name} VALUES ({row})")
    with opened(tmp_path, schema) as source:
        settle(source)
        for sql in (
            f"SELECT value FROM {name.lower()}",
            f"SELECT count(*) FROM {name.upper()}",
            f"SELECT t.id FROM t, (SELECT 1 AS value) JOIN {name} USING (value)",
        ):
            found = source.analyse(sql)
            assert name.lower() in {each.lower() for each in found.beyond}, sql
            assert not found.is_cacheable


def test_json_function_of_another_name_than_the_virtual_table_stays_cacheable(tmp_path: Path) -> None:
    with opened(tmp_path, (*SCHEMA, "CREATE VIRTUAL TABLE json_tree USING fts5(value)")) as source:
        settle(source)
        found = source.analyse("SELECT t.id, value FROM t, json_each('[1]')")
        assert found.beyond == ()
        assert found.is_cacheable


def test_epoch_differs_once_a_virtual_table_has_the_name_of_a_json_function(tmp_path: Path) -> None:
    with opened(tmp_path, SCHEMA) as source:
        settle(source)
        found = source.analyse("SELECT t.id, value FROM t, json_tree('[1]')")
        with closing(sqlite3.connect(source.path)) as db:
            db.execute("CREATE VIRTUAL TABLE json_tree USING fts5(value)")
        settle(source)
        assert source.answer(found, {}) is None


@pytest.mark.parametrize(
    "name",
    [
        *("pragma_table_xinfo", "pragma_table_info", "pragma_table_list", "pragma_index_list", "pragma_index_xinfo"),
        *("pragma_schema_version", "pragma_module_list", "pragma_foreign_key_list", "json_each", "json_tree"),
    ],
)
def test_table_with_the_name_of_a_table_function_of_sqlite_stops_nothing(tmp_path: Path, name: str) -> None:
    tables = ("CREATE TABLE t(id INTEGER PRIMARY KEY, a REFERENCES u(b))", "CREATE TABLE u(b UNIQUE)")
    with opened(tmp_path, tables) as source:
        settle(source)
        before = source.analyse("SELECT a FROM t")
        run(source, f"CREATE TABLE {name}(value, name, type, id, schema, wr)")
        run(source, f"INSERT INTO {name} VALUES (1, 't', 'table', 1, 'main', 0)")
        run(source, "INSERT INTO t VALUES (1, NULL)")
        settle(source)
        answer = source.answer(source.analyse(before.sql), {})
        assert answer is not None and list(answer.rows) == [(None,)]
        assert source.analyse(f"SELECT name FROM {name}").tables == (name,)
    (tmp_path / "later").mkdir()
    with closing(sqlite3.connect(tmp_path / "later" / "app.db")) as db:
        for sql in (*tables, f"CREATE TABLE {name}(value, name, type, id, schema, wr)"):
            db.execute(sql)
    with opened(tmp_path / "later", ("INSERT INTO t VALUES (2, NULL)",)) as source:
        assert source.analyse("SELECT a FROM t").tables == ("t",)
