"""Total orders of results: keys that are appended, keys that identify rows, and queries without either."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.sources.sqlite.query.shop_analysis import opened

from headwater.model.dependencies.dependency import Const, KeyGuard, Param, TopGuard
from headwater.sources.sqlite.source import SqliteSource


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    with opened(tmp_path_factory.mktemp("order")) as source:
        yield source


TOTAL = [
    # statement, what is run, the places of the key
    ("SELECT id, name FROM c", "SELECT id, name FROM c ORDER BY 1", (0,)),
    ("SELECT name FROM c", 'SELECT name FROM c ORDER BY "c"."id"', None),
    ("SELECT name FROM c AS x;", 'SELECT name FROM c AS x ORDER BY "x"."id";', None),
    ("SELECT id FROM c ORDER BY id", "SELECT id FROM c ORDER BY id", (0,)),
    ("SELECT id FROM c ORDER BY 1 DESC", "SELECT id FROM c ORDER BY 1 DESC", (0,)),
    ("SELECT id FROM c ORDER BY region -- so", "SELECT id FROM c ORDER BY region, 1 -- so", (0,)),
    ("SELECT id FROM o ORDER BY day LIMIT 3", "SELECT id FROM o ORDER BY day, 1 LIMIT 3", (0,)),
    ("SELECT id FROM o LIMIT 3 OFFSET ?", "SELECT id FROM o ORDER BY 1 LIMIT 3 OFFSET ?", (0,)),
    ("SELECT id FROM o ORDER BY id COLLATE NOCASE", "SELECT id FROM o ORDER BY id COLLATE NOCASE, 1", (0,)),
    ("SELECT a FROM bare", 'SELECT a FROM bare ORDER BY "bare"."rowid"', None),
    ("SELECT o.id, c.name FROM o JOIN c ON c.id = o.cid", None, (0,)),
    ("SELECT o.id, c.id FROM o JOIN c ON c.boss = o.cid", None, (0, 1)),
    ("SELECT c.id, o.id FROM c LEFT JOIN o ON o.cid = c.id", None, (0, 1)),
    ("SELECT oid, n, sku FROM i", "SELECT oid, n, sku FROM i ORDER BY 1, 2", (0, 1)),
    ("SELECT sku FROM i WHERE oid = 3", None, None),
    ("SELECT cid, count(*) FROM o GROUP BY cid", "SELECT cid, count(*) FROM o GROUP BY cid ORDER BY 1", (0,)),
    ("SELECT count(*) FROM o GROUP BY cid", 'SELECT count(*) FROM o GROUP BY cid ORDER BY "o"."cid"', None),
    ("SELECT lower(day), count(*) FROM o GROUP BY lower(day)", None, (0,)),
    ("SELECT count(*), min(day) FROM o", "SELECT count(*), min(day) FROM o", None),
    ("SELECT sum(CASE WHEN cid = 1 THEN 1 ELSE 0 END) FROM o", None, None),
    ("SELECT DISTINCT name, boss FROM c", "SELECT DISTINCT name, boss FROM c ORDER BY 1, 2", (0, 1)),
    ("SELECT id FROM c UNION SELECT cid FROM o", "SELECT id FROM c UNION SELECT cid FROM o ORDER BY 1", (0,)),
    ("SELECT id FROM c UNION ALL SELECT cid FROM o", "SELECT id FROM c UNION ALL SELECT cid FROM o ORDER BY 1", None),
    ("SELECT 1", "SELECT 1", None),
    ("SELECT id, (SELECT name FROM c WHERE c.id = o.cid) FROM o", None, (0,)),
    ("SELECT v FROM named", "SELECT v FROM named ORDER BY 1", None),  # NULLs may be in its key: by what is shown
]
OPEN = [
    ("SELECT x.tag FROM o x JOIN named n ON n.v = x.cid", "cannot be distinguished"),
    ("SELECT sum(total) FROM o", "sum()"),
    ("SELECT avg(qty) FROM i", "avg()"),  # an INTEGER column may hold floats
    ("SELECT group_concat(name) FROM c", "group_concat()"),
    ("SELECT json_group_array(name) FROM c", "json_group_array()"),
    ("SELECT cid, day FROM o GROUP BY cid", "any row of a group"),
    ("SELECT max(id), day FROM o", "any row of a group"),
    ("SELECT region, count(*) FROM c GROUP BY region", "equal values"),
    ("SELECT DISTINCT region FROM c", "equal values"),
    ("SELECT DISTINCT tag FROM o", "equal values"),
    ("SELECT max(region) FROM c", "max()"),
    ("SELECT id FROM (SELECT id FROM o ORDER BY day LIMIT 3)", "inner LIMIT"),
    ("SELECT id, (SELECT day FROM o WHERE o.cid = c.id) FROM c", "several rows"),
    ("SELECT id, row_number() OVER (ORDER BY day) FROM o", "row_number()"),
    ("SELECT DISTINCT name FROM c ORDER BY boss", "cannot be distinguished"),
]


@pytest.mark.parametrize(("sql", "runs", "key"), TOTAL, ids=[one[0] for one in TOTAL])
def test_query_with_a_total_order_is_recognised_with_its_key(
    shop: SqliteSource, sql: str, runs: str | None, key: tuple[int, ...] | None
) -> None:
    found = shop.analyse(sql)
    assert found.is_total, found.doubts
    assert found.key == key
    assert runs is None or found.sql == runs
    assert all(one.columns is not None for one in found.dependencies)
    assert shop.answer(found, dict.fromkeys(found.parameters, 1)) is not None


@pytest.mark.parametrize(("sql", "why"), OPEN, ids=[one[0] for one in OPEN])
def test_query_without_a_total_order_is_reported_with_a_reason(shop: SqliteSource, sql: str, why: str) -> None:
    found = shop.analyse(sql)
    assert not found.is_total
    assert found.sql == sql and found.key is None
    assert why in found.doubts[0]
    assert all(one.columns is None for one in found.dependencies)


def test_keys_appended_to_the_order_are_dependencies(shop: SqliteSource) -> None:
    (found,) = shop.analyse("SELECT name FROM c").dependencies
    assert found.columns == {"id", "name"}


# --- guards ----------------------------------------------------------------------------------------------------


def guards(shop: SqliteSource, sql: str) -> list[tuple[str, str, str]]:
    found = shop.analyse(sql)
    keys = [guard for guard in found.guards if isinstance(guard, KeyGuard)]
    tables = [one.table for one in found.dependencies]
    return [(tables[one.place], one.column, one.sql) for one in keys]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT o.id, c.name FROM o JOIN c ON c.id = o.cid WHERE o.day = ?",
        "SELECT o.id, c.name FROM o LEFT JOIN c ON c.id = o.cid WHERE o.day = ?",
        "SELECT o.id FROM o WHERE o.day = ? AND EXISTS (SELECT 1 FROM c WHERE c.id = o.cid)",
        "SELECT o.id FROM o WHERE o.day = ? AND o.cid IN (SELECT c.id FROM c)",
        "SELECT o.id, (SELECT name FROM c WHERE c.id = o.cid) FROM o WHERE o.day = ?",
    ],
)
def test_join_partner_is_guarded_by_its_matching_keys(shop: SqliteSource, sql: str) -> None:
    ((table, column, text),) = guards(shop, sql)
    assert (table, column) == ("c", "id")
    assert text.startswith('SELECT DISTINCT "cid" FROM main."o" WHERE ')
    assert '"day" = ?1' in text and text.endswith(" AND ?1 IS ?1")  # as many arguments as the query has


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT o.id, c.name FROM c LEFT JOIN o ON c.id = o.cid AND o.day = 'x'",  # all of c is kept
        "SELECT o.id FROM o WHERE o.day = 'x' AND o.cid NOT IN (SELECT c.id FROM c)",
        "SELECT o.id, c.name FROM o JOIN c ON c.region = o.day WHERE o.total = 1",  # another collation
        "SELECT o.id, c.name FROM o JOIN c ON c.id = o.cid",  # nothing is known of either
        "SELECT o.id FROM o WHERE o.day = 'x' AND o.cid IN (SELECT c.id FROM c LIMIT 2)",
    ],
)
def test_join_without_a_provable_key_has_no_guard(shop: SqliteSource, sql: str) -> None:
    assert not [one for one in guards(shop, sql) if one[0] == "c"]


def test_limited_order_has_a_guard_on_its_first_rows(shop: SqliteSource) -> None:
    found = shop.analyse("SELECT id, day FROM o WHERE cid = 1 ORDER BY day DESC LIMIT :n OFFSET 2")
    assert found.guards == (TopGuard(0, (("day", True), ("id", False)), (1, 0), Param("n")),)
    found = shop.analyse("SELECT id, day FROM o ORDER BY day LIMIT 7")
    assert found.guards == (TopGuard(0, (("day", False), ("id", False)), (1, 0), Const(7)),)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id FROM o ORDER BY day LIMIT 7",  # day is not shown
        "SELECT id, day FROM o ORDER BY lower(day) LIMIT 7",
        "SELECT id, day FROM o ORDER BY day NULLS LAST LIMIT 7",
        "SELECT id, day FROM o ORDER BY day COLLATE NOCASE LIMIT 7",
        "SELECT DISTINCT id, day FROM o ORDER BY day LIMIT 7",
        "SELECT id, day FROM o ORDER BY day LIMIT -1",
        "SELECT o.id, day FROM o JOIN c ON c.id = o.cid ORDER BY day LIMIT 7",
    ],
)
def test_unsuitable_order_has_no_guard_on_its_first_rows(shop: SqliteSource, sql: str) -> None:
    assert not [guard for guard in shop.analyse(sql).guards if isinstance(guard, TopGuard)]
