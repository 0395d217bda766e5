"""The traps of reference/queries.md §9 that a SQLite query can step into, by their numbers.

Those of matching, tags and concurrency are tested where these are: ELSEWHERE says by which tests. Of 9, 16, 18, 19 and
20 the parts that are about PostgreSQL and MySQL wait for those sources.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from tests.sources.sqlite.query.shop_analysis import SHOP, dependency_texts, opened, run

from headwater.errors import HeadwaterError
from headwater.sources.sqlite.query.determinism.deterministic_functions import DETERMINISTIC
from headwater.sources.sqlite.query.syntax.name_resolution import is_aggregate
from headwater.sources.sqlite.query.syntax.parser import parse
from headwater.sources.sqlite.source import SqliteSource

ELSEWHERE = {
    10: [
        "queries/dependencies/test_bound_dependencies.py::test_change_of_a_value_or_its_type_is_relevant",
        "queries/dependencies/test_bound_dependencies.py::test_update_with_identical_values_is_irrelevant",
    ],
    18: ["queries/dependencies/test_bound_dependencies.py::test_change_with_unknown_rows_is_relevant"],
    19: [
        "sources/sqlite/capture/test_triggers.py::test_foreign_key_actions_are_captured",
        "sources/sqlite/capture/test_conflicts.py::test_replace_that_displaces_several_rows_captures_each_delete",
    ],
    22: [
        "queries/dependencies/test_instance_router.py::test_router_finds_the_same_instances_as_checking_each",
        "queries/dependencies/test_change_sketch.py::test_sketch_is_never_below_the_last_relevant_change",
        "queries/dependencies/test_change_sketch.py::test_slots_are_the_same_in_every_process",
        "soundness/test_matchers_agree.py::test_no_matcher_misses_a_row_that_sqlite_matches",
    ],
    23: [
        "queries/dependencies/test_instance_versions.py::test_tag_beyond_the_log_is_not_current",
        "soundness/test_http_soundness.py::test_no_acknowledged_write_is_missing_from_answers_while_two_processes_write",
        "soundness/test_http_soundness.py::test_mutant_that_returns_a_wrong_304_is_found",
    ],
    24: [
        "conformance/test_query_feeds.py::test_feed_started_at_a_tag_delivers_only_later_invalidations",
        "conformance/test_query_feeds.py::test_every_changed_answer_is_preceded_by_an_invalidation",
    ],
    25: [
        "conformance/test_queries_http.py::test_query_in_a_transaction_reads_its_writes_and_has_no_tag",
        "feeds/query_feeds/test_invalidations.py::test_each_transaction_is_one_invalidation_at_its_last_relevant_change",
        "feeds/query_feeds/test_invalidations.py::test_reader_never_advances_into_an_unfinished_transaction",
    ],
}
TRAPS = 27


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    extra = (
        "CREATE TABLE u16(k INTEGER PRIMARY KEY, n INTEGER COLLATE NOCASE, r REAL, t TEXT, x)",
        "CREATE VIRTUAL TABLE words USING fts5(body)",
    )
    with opened(tmp_path_factory.mktemp("traps"), (*SHOP, *extra)) as source:
        yield source


def one(shop: SqliteSource, sql: str) -> str:
    (found,) = dependency_texts(shop.analyse(sql))
    return found


def test_each_trap_has_a_test() -> None:
    here = {int(found[1]) for name in globals() if (found := re.match(r"test_trap_(\d+)_", name))}
    assert here.isdisjoint(ELSEWHERE)
    assert here | ELSEWHERE.keys() == set(range(1, TRAPS + 1))
    tests = Path(__file__).parents[4]
    for place in (place for places in ELSEWHERE.values() for place in places):
        file, name = place.split("::")
        assert re.search(rf"^def {name}\(", (tests / file).read_text(), re.MULTILINE), place


def test_trap_1_numbered_parameter_inside_sql_between_is_recognised(shop: SqliteSource) -> None:
    sql = "SELECT id FROM o WHERE cid BETWEEN ?1 AND 5 AND total < $y"
    assert one(shop, sql) == "o: columns cid, id, total; rows where cid between ?1 and 5 and total < :y"


def test_trap_2_negated_operators_are_understood_or_left_out(shop: SqliteSource) -> None:
    where = "day NOT LIKE 'a%' AND day NOT GLOB 'b*' AND cid NOT IN (1) AND total NOT BETWEEN 1 AND 2"
    sql = f"SELECT id FROM o WHERE {where}"
    expected = "o: columns cid, day, id, total; rows where cid not in (1) and (total < 1 or total > 2)"
    assert one(shop, sql) == expected


def test_trap_3_table_named_after_in_is_a_dependency(shop: SqliteSource) -> None:
    assert dependency_texts(shop.analyse("SELECT name FROM c WHERE id IN chosen")) == [
        "c: columns id, name",
        "chosen: columns id",
    ]


def test_trap_4_quoted_unknown_name_is_refused(shop: SqliteSource) -> None:
    with pytest.raises(HeadwaterError, match="no such column"):
        shop.analyse('SELECT name FROM c WHERE region = "nowhere"')


def test_trap_4_names_of_the_rowid_are_resolved(shop: SqliteSource) -> None:
    for name in ("rowid", "oid", "_rowid_", "ROWID", "o.oid"):
        assert one(shop, f"SELECT {name} FROM o WHERE {name} = 3") == "o: columns id; rows where id = 3"
    assert one(shop, "SELECT a FROM bare WHERE rowid = 3") == "bare: columns a, rowid; rows where rowid = 3"
    found = shop.analyse("SELECT v FROM named WHERE rowid = 3")
    assert found.volatile == ("the rowid of 'named' is not captured",)


def test_trap_4_natural_joins_and_functions_in_from_are_resolved(shop: SqliteSource) -> None:
    natural = shop.analyse("SELECT id FROM main.c NATURAL JOIN made WHERE id = 2")
    assert dependency_texts(natural) == ["c: columns id; rows where id = 2", "made: columns id; rows where id = 2"]
    rows = shop.analyse("SELECT j.value FROM main.o, json_each(o.tag) AS j WHERE o.id = 1")
    assert dependency_texts(rows) == ["o: columns id, tag; rows where id = 1"]
    assert rows.is_cacheable


def test_trap_5_names_of_with_hide_tables_only_in_their_scope(shop: SqliteSource) -> None:
    sql = """WITH o AS (SELECT id, boss AS cid FROM c WHERE boss = 1)
        SELECT id FROM o WHERE cid = 2 AND EXISTS (SELECT 1 FROM main.o AS x WHERE x.cid = o.cid)"""
    assert dependency_texts(shop.analyse(sql)) == [
        "c: columns boss, id; rows where boss = 1 and boss = 2",
        "o: columns cid; rows where cid = 2",
    ]


def test_trap_6_adjacent_strings_are_refused_and_json_paths_are_read(shop: SqliteSource) -> None:
    with pytest.raises(HeadwaterError):
        shop.analyse("SELECT id FROM o WHERE day = 'x' 'y'")
    found = shop.analyse("SELECT tag ->> '$.a', tag -> 'b' FROM o WHERE id = 1")
    assert dependency_texts(found) == ["o: columns id, tag; rows where id = 1"]


def test_trap_7_alias_repeated_in_a_subquery_is_resolved_in_its_scope(shop: SqliteSource) -> None:
    sql = "SELECT name FROM c WHERE c.id = 5 AND EXISTS (SELECT 1 FROM c WHERE c.boss = c.id)"
    assert dependency_texts(shop.analyse(sql)) == [
        "c: columns boss, id; rows where boss is not null",
        "c: columns id, name; rows where id = 5",
    ]


def test_trap_8_unions_of_mixed_affinities_or_collations_pass_no_condition(shop: SqliteSource) -> None:
    for second in ("SELECT t FROM u16", "SELECT n FROM u16", "SELECT max(k) FROM u16", "SELECT r FROM u16"):
        sql = f"SELECT * FROM (SELECT k AS v FROM u16 UNION ALL {second}) WHERE v = '1'"
        assert all("where" not in place for place in dependency_texts(shop.analyse(sql))), second
    same = "SELECT * FROM (SELECT k AS v FROM u16 UNION ALL SELECT cid FROM o) WHERE v = '1'"
    assert all("where" in place for place in dependency_texts(shop.analyse(same)))


def test_trap_9_equality_is_carried_only_between_columns_that_compare_alike(shop: SqliteSource) -> None:
    for pair in ("u.t = o.cid", "u.x = o.cid", "u.n = o.cid", "u.k + 0 = o.cid", "u.k COLLATE NOCASE = o.cid"):
        sql = f"SELECT u.k FROM u16 u JOIN o ON {pair} WHERE o.cid = 1"
        assert not [
            place for place in dependency_texts(shop.analyse(sql)) if place.startswith("u16") and "= 1" in place
        ], pair
    assert "u16: columns k, r; rows where r = 1" in dependency_texts(
        shop.analyse("SELECT u.k FROM u16 u JOIN o ON u.r = o.cid WHERE o.cid = 1")
    )


@pytest.mark.parametrize(
    "refusal",
    ["o.id IS NULL", "coalesce(o.total, 5) = 5", "o.total = 5 OR o.total IS NULL", "o.total IS :x", "ifnull(o.id, 1)"],
)
def test_trap_11_condition_that_accepts_null_does_not_narrow_a_left_join(shop: SqliteSource, refusal: str) -> None:
    found = dependency_texts(
        shop.analyse(f"SELECT c.id FROM c LEFT JOIN o ON o.cid = c.id AND o.day = 'd' WHERE {refusal}")
    )
    assert found[0].startswith("c: ") and "where" not in found[0]
    assert found[1].endswith("rows where cid is not null and day = 'd'")


def test_trap_11_full_join_passes_no_condition(shop: SqliteSource) -> None:
    found = dependency_texts(
        shop.analyse("SELECT c.id FROM c FULL JOIN o ON o.cid = c.id AND c.id = 1 WHERE coalesce(c.id, 0) = 1")
    )
    assert all("where" not in place for place in found)


@pytest.mark.parametrize(
    "inner",
    [
        "SELECT cid, day FROM o LIMIT 3",
        "SELECT cid, day FROM o LIMIT -1 OFFSET 1",
        "SELECT cid, count(*) OVER () AS n FROM o",
        "SELECT max(cid) AS cid FROM o",
        "SELECT count(*) AS cid FROM o",
        "SELECT region AS cid FROM c GROUP BY region",
        "SELECT DISTINCT region AS cid FROM c",
        "SELECT total + 0 AS cid FROM o",
        "SELECT day AS cid FROM o GROUP BY id",
    ],
)
def test_trap_12_condition_is_not_passed_into_these_subqueries(shop: SqliteSource, inner: str) -> None:
    found = dependency_texts(shop.analyse(f"SELECT * FROM ({inner}) WHERE cid = 1"))
    assert all("where" not in place for place in found)


def test_trap_13_not_in_depends_on_every_row_of_its_subquery(shop: SqliteSource) -> None:
    sql = "SELECT id FROM c WHERE id = 1 AND id NOT IN (SELECT cid FROM o)"
    found = shop.analyse(sql)
    assert dependency_texts(found) == ["c: columns id; rows where id = 1", "o: columns cid"]
    assert found.guards == ()


def test_trap_14_like_is_left_out_of_conditions(shop: SqliteSource) -> None:
    assert one(shop, "SELECT id FROM c WHERE name LIKE 'a'") == "c: columns id, name"
    assert one(shop, "SELECT id FROM c WHERE region = 'Ä'") == "c: columns id, region; rows where region = 'Ä'"


def test_trap_15_large_integers_are_compared_exactly_or_left_out(shop: SqliteSource) -> None:
    assert one(shop, "SELECT id FROM o WHERE cid > 9223372036854775808").endswith("cid > 9.223372036854776e+18")
    assert one(shop, "SELECT id FROM o WHERE cid > 0x7fffffffffffffff").endswith("cid > 9223372036854775807")
    assert one(shop, "SELECT id FROM o WHERE cid > 0xffffffffffffffff") == "o: columns cid, id"
    # A REAL column would round what it is compared with.
    assert one(shop, "SELECT id FROM o WHERE total > 9007199254740993") == "o: columns id, total"
    assert one(shop, "SELECT id FROM o WHERE total > '9007199254740993'") == "o: columns id, total"


def test_trap_16_clock_functions_are_volatile_with_any_argument(shop: SqliteSource) -> None:
    for call in ("date(day)", "datetime('2024-01-01')", "strftime('%Y', day)", "julianday(day)", "unixepoch(day)"):
        assert not shop.analyse(f"SELECT {call} FROM o").is_cacheable, call
    for call in ("CURRENT_TIMESTAMP", "CURRENT_DATE", "current_time", "random()", "changes()", "last_insert_rowid()"):
        assert not shop.analyse(f"SELECT {call}").is_cacheable, call
    run(shop, "CREATE VIEW today AS SELECT date('now') AS d")
    assert not shop.analyse("SELECT d FROM today").is_cacheable


def test_trap_17_temporary_table_is_refused(shop: SqliteSource) -> None:
    with pytest.raises(HeadwaterError):
        shop.read("CREATE TEMP TABLE c(id)")


def test_trap_20_schema_change_alters_the_epoch_of_keyless_tables_only(shop: SqliteSource) -> None:
    before = shop.analyse("SELECT a FROM bare"), shop.analyse("SELECT id FROM c")
    run(shop, "CREATE INDEX later ON o(day)")
    after = shop.analyse("SELECT a FROM bare"), shop.analyse("SELECT id FROM c")
    assert before[0].epoch != after[0].epoch
    assert before[1].epoch == after[1].epoch


def test_trap_21_virtual_and_schema_tables_are_uncacheable(shop: SqliteSource) -> None:
    for sql in (
        "SELECT body FROM words",
        "SELECT count(*) FROM words",
        "SELECT name FROM sqlite_schema",
        "SELECT count(*) FROM sqlite_schema",
        "SELECT name FROM pragma_table_info('c')",
        "SELECT count(*) FROM pragma_table_list",
    ):
        with contextlib.suppress(HeadwaterError):  # refused is fine, too
            assert not shop.analyse(sql).is_cacheable, sql


def test_trap_26_oversized_conditions_are_dropped(shop: SqliteSource) -> None:
    values = ", ".join(map(str, range(5_000)))
    assert one(shop, f"SELECT id FROM o WHERE cid IN ({values}) AND day = 'x'").endswith("rows where day = 'x'")
    doubling = "".join(
        f", w{n} AS (SELECT id FROM w{n - 1} WHERE id IN (SELECT id FROM w{n - 1}))" for n in range(1, 9)
    )
    found = shop.analyse(f"WITH w0 AS (SELECT id FROM c){doubling} SELECT count(*) FROM w8")
    assert dependency_texts(found) == ["c: all columns"]
    assert "more than" in found.doubts[0]


def test_trap_27_second_statement_is_refused(shop: SqliteSource) -> None:
    with pytest.raises(HeadwaterError, match="one statement"):
        shop.analyse("SELECT 1; SELECT 2")
    assert shop.analyse("SELECT id FROM c WHERE id = 1; -- no more").doubts == ()


def test_every_deterministic_aggregate_is_recognised_as_an_aggregate() -> None:
    functions = "SELECT DISTINCT name FROM pragma_function_list WHERE type IN ('a', 'w')"
    windows = {"row_number", "rank", "dense_rank", "percent_rank", "cume_dist", "ntile", "lag", "lead"}
    windows |= {"first_value", "last_value", "nth_value"}
    names = {str(name) for (name,) in apsw.Connection(":memory:").execute(functions)} - windows
    assert {"sum", "group_concat"} <= names
    for name in names & DETERMINISTIC:
        assert is_aggregate(parse(f"SELECT {name}(x)").selects[0].outputs[0].of), name
