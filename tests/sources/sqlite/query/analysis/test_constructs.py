"""Dependencies of each construct of a query: for each table reference its columns and its condition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.sources.sqlite.query.shop_analysis import dependency_texts, opened

from headwater.sources.sqlite.source import SqliteSource

CASES = [
    ("select name from c where id = 5", ["c: columns id, name; rows where id = 5"]),
    (
        "select * from o where cid = ?1 and total > 5",
        ["o: columns cid, day, id, tag, total; rows where cid = ?1 and total > 5"],
    ),
    (
        "select id from o where cid = ? and (total > 5 or day = 'x')",
        ["o: columns cid, day, id, total; rows where cid = ?1 and (total > 5 or day = 'x')"],
    ),
    (
        "select id from o where cid = ? and (total > 5 or lower(day) = 'x')",
        ["o: columns cid, day, id, total; rows where cid = ?1"],
    ),
    (
        "select id from o where not (cid = 5 or total < 3)",
        ["o: columns cid, id, total; rows where cid <> 5 and total >= 3"],
    ),
    ("select id from o where not (cid = 5 and lower(day) = 'x')", ["o: columns cid, day, id"]),
    ("select id from o where cid in (1, 2, :x)", ["o: columns cid, id; rows where cid in (1, 2, :x)"]),
    ("select id from o where cid not in (1, 2)", ["o: columns cid, id; rows where cid not in (1, 2)"]),
    ("select id from o where cid in ()", ["o: columns cid, id; rows where never"]),
    ("select id from o where total between 1 and 5", ["o: columns id, total; rows where total between 1 and 5"]),
    ("select id from o where total not between 1 and 5", ["o: columns id, total; rows where total < 1 or total > 5"]),
    (
        "select id from o where 5 between cid and total",
        ["o: columns cid, id, total; rows where cid <= 5 and total >= 5"],
    ),
    ("select id from o where 5 < cid", ["o: columns cid, id; rows where cid > 5"]),
    ("select id from o where cid is null", ["o: columns cid, id; rows where cid is null"]),
    ("select id from o where cid notnull", ["o: columns cid, id; rows where cid is not null"]),
    ("select id from o where cid is not 5", ["o: columns cid, id; rows where cid is not 5"]),
    ("select id from o where cid is not distinct from 5", ["o: columns cid, id; rows where cid is 5"]),
    ("select id from o where cid is true", ["o: columns cid, id"]),
    ("select id from o where cid = true", ["o: columns cid, id; rows where cid = 1"]),
    (
        "select id from o where cid = -5 and total > -1.5",
        ["o: columns cid, id, total; rows where cid = -5 and total > -1.5"],
    ),
    ("select id from o where day = x'00ff'", ["o: columns day, id; rows where day = x'00ff'"]),
    (
        "select id from o where cid = 9223372036854775808",
        ["o: columns cid, id; rows where cid = 9.223372036854776e+18"],
    ),
    (
        "select id from o where cid = -9223372036854775808",
        ["o: columns cid, id; rows where cid = -9223372036854775808"],
    ),
    ("select id from o where total < 9007199254740993", ["o: columns id, total"]),
    ("select id from o where cid = '5'", ["o: columns cid, id; rows where cid = '5'"]),
    ("select id from o where cid = 5 + 0", ["o: columns cid, id"]),
    ("select id from o where +cid = 5", ["o: columns cid, id"]),
    ("select id from o where cast(cid as text) = '5'", ["o: columns cid, id"]),
    ("select id from c where region = 'x' collate binary", ["c: columns id, region"]),
    ("select id from c where region collate nocase = 'x'", ["c: columns id, region; rows where region = 'x'"]),
    ("select id from c where region = 'x'", ["c: columns id, region; rows where region = 'x'"]),
    ("select id from o where (cid, day) = (5, 'x')", ["o: columns cid, day, id; rows where cid = 5 and day = 'x'"]),
    ("select id from o where cid = 5 and 0", ["o: columns cid, id; rows where cid = 5 and never"]),
    ("select id from o where tag = 5", ["o: columns id, tag; rows where tag = 5"]),
    (
        "select c.name from c join o on o.cid = c.id where c.id = 7",
        ["c: columns id, name; rows where id = 7", "o: columns cid, id; rows where cid = 7"],
    ),
    (
        "select c.name from c, o where o.cid = c.id and o.total > 5",
        ["c: columns id, name", "o: columns cid, id, total; rows where cid is not null and total > 5"],
    ),
    (
        "select c.name from c cross join o where o.cid = c.id and c.id in (1, 2)",
        ["c: columns id, name; rows where id in (1, 2)", "o: columns cid, id; rows where cid in (1, 2)"],
    ),
    (
        "select c.name, o.day from c left join o on o.cid = c.id and o.total > 5 where c.id = 7",
        ["c: columns id, name; rows where id = 7", "o: columns cid, day, id, total; rows where total > 5 and cid = 7"],
    ),
    (
        "select c.name, o.day from c left join o on o.cid = c.id and c.region = 'x'",
        ["c: columns id, name, region", "o: columns cid, day, id; rows where cid is not null"],
    ),
    (
        "select c.name, o.day from c left join o on o.cid = c.id where o.total > 5",
        ["c: columns id, name", "o: columns cid, day, id, total; rows where total > 5 and cid is not null"],
    ),
    (
        "select c.name, o.day from c left join o on o.cid = c.id where o.id is null and c.id = 3",
        ["c: columns id, name; rows where id = 3", "o: columns cid, day, id; rows where cid = 3"],
    ),
    (
        "select c.name, o.day from c left join o on o.cid = c.id where coalesce(o.total, 5) = 5",
        ["c: columns id, name", "o: columns cid, day, id, total; rows where cid is not null"],
    ),
    (
        "select c.name, o.day from c left join o on o.cid = c.id where o.total = 5 or o.total is null",
        ["c: columns id, name", "o: columns cid, day, id, total; rows where cid is not null"],
    ),
    (
        "select c.name, o.day from o right join c on o.cid = c.id where c.id = 7",
        ["c: columns id, name; rows where id = 7", "o: columns cid, day, id; rows where cid = 7"],
    ),
    (
        "select c.name, o.day from c full join o on o.cid = c.id where c.id = 7",
        ["c: columns id, name; rows where id = 7", "o: columns cid, day, id; rows where cid = 7"],
    ),
    (
        "select c.name, o.day from c full join o on o.cid = c.id and c.id = 7",
        ["c: columns id, name", "o: columns cid, day, id"],
    ),
    (
        "select c.name, o.day from c full join o on o.cid = c.id where c.id = 7 and o.total > 1",
        ["c: columns id, name; rows where id = 7", "o: columns cid, day, id, total; rows where total > 1 and cid = 7"],
    ),
    (
        "select i.sku from o join i on i.oid = o.id and o.id = 4",
        ["i: columns n, oid, sku; rows where oid = 4", "o: columns id; rows where id = 4"],
    ),
    (
        "select o.id from o natural join big where cid = 3",
        [
            "o: columns cid, id, total; rows where cid = 3 and total is not null",
            "o: columns cid, id, total; rows where total > 100 and cid = 3",
        ],
    ),
    ("select * from big where cid = 7", ["o: columns cid, id, total; rows where total > 100 and cid = 7"]),
    ("select x from bigger where x = 7", ["o: columns cid, total; rows where total > 100 and total > 200 and cid = 7"]),
    ("select count(*) from big", ["o: columns total; rows where total > 100"]),
    (
        "with r as (select cid, total from o) select total from r where cid = 5",
        ["o: columns cid, total; rows where cid = 5"],
    ),
    (
        "with r as (select cid, total from o) select a.total from r a join r b on a.cid = b.cid where a.cid = 5",
        ["o: columns cid, total; rows where cid = 5", "o: columns cid; rows where cid = 5"],
    ),
    (
        "with recursive t(n, b) as (select id, boss from c where id = 1 union all select c.id, c.boss"
        " from c join t on c.boss = t.n where c.region = 'x') select n from t where n = 5",
        ["c: all columns; rows where id = 1", "c: all columns; rows where region = 'x'"],
    ),
    (
        "select id from o where cid = 5 union select id from c where id = 6",
        ["c: columns id; rows where id = 6", "o: columns cid, id; rows where cid = 5"],
    ),
    (
        "select * from (select id, cid from o union all select id, boss from c) where cid = 5",
        ["c: columns boss, id; rows where boss = 5", "o: columns cid, id; rows where cid = 5"],
    ),
    (
        "select * from (select id, day from o union all select id, region from c) where day = 'x'",
        ["c: all columns", "o: all columns"],
    ),
    ("select * from (select cid k from o union select sku from i) where k = 5", ["i: columns sku", "o: columns cid"]),
    ("select * from (select cid, total from o limit 5) where cid = 5", ["o: all columns"]),
    ("select * from (select cid, row_number() over (order by total) r from o) where cid = 5", ["o: all columns"]),
    (
        "select * from (select cid, count(*) n from o group by cid) where cid = 5",
        ["o: columns cid; rows where cid = 5"],
    ),
    ("select * from (select cid, count(*) n from o group by cid) where n = 5", ["o: columns cid"]),
    ("select * from (select region, count(*) n from c group by region) where region = 'x'", ["c: all columns"]),
    ("select * from (select distinct cid from o) where cid = 5", ["o: columns cid; rows where cid = 5"]),
    ("select * from (select max(cid) m from o) where m = 5", ["o: columns cid"]),
    (
        "select cid, count(*) from o group by cid having cid > 5 and count(*) > 2",
        ["o: columns cid; rows where cid > 5"],
    ),
    (
        "select name from c where exists (select total from o where o.cid = c.id and c.id = 5)",
        ["c: columns id, name", "o: columns cid; rows where cid = 5"],
    ),
    (
        "select name from c where c.id = 5 and exists (select 1 from o where o.cid = c.id)",
        ["c: columns id, name; rows where id = 5", "o: columns cid; rows where cid = 5"],
    ),
    (
        "select name from c where c.id = 5 and not exists (select 1 from o where o.cid = c.id)",
        ["c: columns id, name; rows where id = 5", "o: columns cid; rows where cid = 5"],
    ),
    (
        "select name from c where id in (select cid from o where total > 5) and id = 3",
        ["c: columns id, name; rows where id = 3", "o: columns cid, total; rows where total > 5 and cid = 3"],
    ),
    (
        "select name from c where id not in (select cid from o where total > 5) and id = 3",
        ["c: columns id, name; rows where id = 3", "o: columns cid, total; rows where total > 5"],
    ),
    (
        "select name, (select max(day) from o where o.cid = c.id) from c where c.id = 5",
        ["c: columns id, name; rows where id = 5", "o: columns cid, day; rows where cid = 5"],
    ),
    ("select id in (select cid from o) from c where id = 5", ["c: columns id; rows where id = 5", "o: columns cid"]),
    (
        "select c.id from c left join o on o.cid = c.id and exists (select 1 from i where i.oid = o.id) where c.id = 1",
        ["c: columns id; rows where id = 1", "i: columns oid", "o: columns cid, id; rows where cid = 1"],
    ),
    (
        "select c.id from c where c.id = 5 and exists (select 1 from c where c.boss = 3)",
        ["c: columns boss; rows where boss = 3", "c: columns id; rows where id = 5"],
    ),
    ("select twice from made where twice = 4", ["made: columns id, twice; rows where twice = 4"]),
    ("select rowid, a from bare where rowid = 5", ["bare: columns a, rowid; rows where rowid = 5"]),
    ("select oid from o where _rowid_ = 3", ["o: columns id; rows where id = 3"]),
    ("select o.id from o, json_each(o.tag) where o.cid = 5", ["o: columns cid, id, tag; rows where cid = 5"]),
    (
        "select 1 from o where o.id = (select o.cid from c where c.id = 5)",
        ["c: columns id; rows where id = 5", "o: columns cid, id"],
    ),
    (
        "select o.id from o where (o.cid = 1 and o.total > 5) or (o.cid = 2 and o.total > 7)",
        ["o: columns cid, id, total; rows where (cid = 1 and total > 5) or (cid = 2 and total > 7)"],
    ),
    (
        "select o.id from o join c on o.cid = c.id where (o.total = 1 and c.name = 'a') or (o.total = 2"
        " and c.name = 'b')",
        [
            "c: columns id, name; rows where name = 'a' or name = 'b'",
            "o: columns cid, id, total; rows where (total = 1 or total = 2) and cid is not null",
        ],
    ),
    (
        "select i.sku from i join o on o.id = i.oid join c on c.id = o.cid where c.id = 9",
        ["c: columns id; rows where id = 9", "i: columns n, oid, sku", "o: columns cid, id; rows where cid = 9"],
    ),
    (
        "select made.a from made join c using (id) where id = 4",
        ["c: columns id; rows where id = 4", "made: columns a, id; rows where id = 4"],
    ),
    ("select name from c where id in chosen", ["c: columns id, name", "chosen: columns id"]),
    ("select b from bare where b = 'x'", ["bare: columns b, rowid; rows where b = 'x'"]),
    ("select sum(qty) from i where oid = 3", ["i: all columns; rows where oid = 3"]),
    ("select * from (values (1, 2), (3, 4))", []),
    (
        "select id from o where exists (select 1 from i where oid = o.id limit 1) and id = 3",
        ["i: columns oid; rows where oid = 3", "o: columns id; rows where id = 3"],
    ),
    (
        "select name from c where id = (select max(cid) from o where day > 'x')",
        ["c: columns id, name", "o: columns cid, day; rows where day > 'x'"],
    ),
    (
        "select c.id from c left join (o join i on i.oid = o.id) on o.cid = c.id where c.id = 2",
        ["c: columns id; rows where id = 2", "i: columns n, oid", "o: columns cid, id; rows where cid = 2"],
    ),
    (
        "select name from c where id = 1 except select name from c where id = 2",
        ["c: columns id, name; rows where id = 1", "c: columns id, name; rows where id = 2"],
    ),
    (
        "select case when id = 1 then (select count(*) from i) end from o where cid = 4",
        ["i: no column, only which rows there are", "o: columns cid, id; rows where cid = 4"],
    ),
    ("select id from o where day like 'a%' and cid = 2", ["o: columns cid, day, id; rows where cid = 2"]),
    (
        "select id from o order by (select max(qty) from i where i.oid = o.id), id",
        ["i: columns oid, qty", "o: columns id"],
    ),
]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteSource]:
    with opened(tmp_path_factory.mktemp("constructs")) as source:
        yield source


@pytest.mark.parametrize(("sql", "places"), CASES, ids=[sql[:60] for sql, _ in CASES])
def test_each_construct_is_analysed_with_its_dependencies(shop: SqliteSource, sql: str, places: list[str]) -> None:
    found = shop.analyse(sql)
    assert dependency_texts(found) == places
    assert not [doubt for doubt in found.doubts if not doubt.startswith("every column counts")]
    assert not found.volatile


def test_names_are_resolved_in_any_case_and_quotes(shop: SqliteSource) -> None:
    for sql in ('SELECT "NAME" FROM [C] WHERE `Id` = 5', "select c.NAME from main.c where C.ID = 5"):
        assert dependency_texts(shop.analyse(sql)) == ["c: columns id, name; rows where id = 5"]


def test_parameters_keep_the_slots_that_sqlite_assigns(shop: SqliteSource) -> None:
    found = shop.analyse("SELECT id FROM o WHERE cid = :who AND total > ?1 AND day = ? AND tag IN ($t, @u, ?2)")
    assert found.parameters == ("who", "2", "t", "u")
    assert dependency_texts(found) == [
        "o: columns cid, day, id, tag, total; rows where cid = :who and total > :who and day = ?2"
        " and tag in (:t, :u, ?2)"
    ]
