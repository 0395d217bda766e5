"""Answers that the plan decides: by an approximate index, or by the order in which rows reach an aggregate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sources.postgres.pg_source import PgRig

from headwater.errors import Forbidden, NotSupported
from headwater.model.principal import EDITOR, VIEWER
from headwater.sources.postgres.query.analysis.volatile_calls import refuse

pytestmark = pytest.mark.every_server
APPROXIMATE = "an approximate index may choose the rows"


def extension(own: PgRig, name: str) -> None:
    """Create an extension, or skip the test if the server lacks it."""
    if not own.db.execute("SELECT 1 FROM pg_available_extensions WHERE name = %s", [name]).fetchall():
        pytest.skip(f"this PostgreSQL has no extension {name}")
    own.run(f"CREATE EXTENSION {name}")


def is_approximate(own: PgRig, sql: str) -> bool:
    return any(APPROXIMATE in each for each in own.source.analyse(sql).volatile)


def test_ordering_operator_of_an_access_method_of_users_is_not_cacheable(rig: Callable[..., PgRig]) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY, c circle, p point)")
    nearest = "SELECT id FROM t ORDER BY c <-> point(1, 1), id LIMIT 3"
    assert own.source.analyse(nearest).is_cacheable
    own.run(
        "CREATE ACCESS METHOD near TYPE INDEX HANDLER gisthandler",
        "CREATE OPERATOR CLASS near_circle FOR TYPE circle USING near AS"
        " OPERATOR 15 <->(circle, point) FOR ORDER BY float_ops",
    )
    assert is_approximate(own, nearest)
    # PostgreSQL exchanges the operands to use the index.
    assert is_approximate(own, "SELECT id FROM t ORDER BY point(1, 1) <-> c, id LIMIT 3")
    own.run("CREATE VIEW v AS SELECT id, c <-> point(1, 1) AS d FROM t")
    assert is_approximate(own, "SELECT min(d) FROM v")
    assert own.source.analyse("SELECT id FROM t ORDER BY p <-> point(1, 1), id LIMIT 3").is_cacheable


@pytest.mark.parametrize("index", ["hnsw", "ivfflat"])
def test_nearest_vectors_are_not_cacheable(rig: Callable[..., PgRig], index: str) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY)")
    extension(own, "vector")
    own.run("ALTER TABLE t ADD e vector(3), ADD b bit(3)", f"CREATE INDEX ON t USING {index} (e vector_l2_ops)")
    for operator in ("<->", "<=>", "<#>", "<+>"):
        assert is_approximate(own, f"SELECT id FROM t ORDER BY e {operator} $1::vector, id LIMIT 3")
    for operator in ("<~>", "<%>"):
        assert is_approximate(own, f"SELECT id FROM t ORDER BY b {operator} B'101', id LIMIT 3")
    for exact in ("WHERE e = '[1,2,3]' ORDER BY id", "ORDER BY l2_distance(e, $1), id LIMIT 3"):
        assert own.source.analyse(f"SELECT id FROM t {exact}").is_cacheable


def test_distance_operators_of_vector_are_not_cacheable_without_an_operator_class(rig: Callable[..., PgRig]) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY)")
    extension(own, "cube")
    own.run("ALTER TABLE t ADD e cube")
    nearest = "SELECT id FROM t ORDER BY e <-> '(1,2,3)', id LIMIT 3"
    assert own.source.analyse(nearest).is_cacheable  # an index of PostgreSQL's own GiST is exact
    own.run("UPDATE pg_extension SET extname = 'vector' WHERE extname = 'cube'")
    assert is_approximate(own, nearest)


@pytest.mark.parametrize(
    ("name", "sql"),
    [
        ("citext", "SELECT min(c) FROM t"),
        ("citext", "SELECT max(c) FROM t WHERE id > 1 GROUP BY id ORDER BY id"),
        ("citext", "SELECT id, min(c) OVER () FROM t ORDER BY id"),
        ("citext", "SELECT id FROM t WHERE c = (SELECT max(c) FROM t) ORDER BY id"),
        ("vector", "SELECT sum(c) FROM t"),
        ("vector", "SELECT avg(c) FROM t"),
        ("vector", "SELECT id, sum(c) OVER (ORDER BY id) FROM t ORDER BY id"),
    ],
)
def test_aggregate_of_an_extension_may_depend_on_the_order_of_its_rows(
    rig: Callable[..., PgRig], name: str, sql: str
) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY, note text)")
    extension(own, name)
    own.run(f"ALTER TABLE t ADD c {name}")
    found = own.source.analyse(sql)
    assert found.is_cacheable and not found.is_total
    assert any("of an extension may depend on the order of its rows" in each for each in found.doubts)
    assert [each.columns for each in found.dependencies] == [None]
    assert own.source.analyse("SELECT count(c), count(DISTINCT c), max(id) FROM t").is_total


def test_percentile_of_equal_values_that_look_different_counts_every_column(rig: Callable[..., PgRig]) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY, f float8, i interval)")
    for column in ("f", "i"):  # 0 and -0, 1 month and 30 days
        found = own.source.analyse(f"SELECT percentile_cont(0) WITHIN GROUP (ORDER BY {column}) FROM t")
        assert found.doubts == ("percentile_cont() may take any of several equal values",)


def ignore_case(own: PgRig) -> None:
    """Create a collation that treats upper and lower case as equal, or skip the test."""
    if not own.db.execute("SELECT 1 FROM pg_collation WHERE collname = 'en-x-icu'").fetchall():
        pytest.skip("this PostgreSQL was built without ICU")
    own.run("CREATE COLLATION ci (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")


@pytest.mark.parametrize(
    ("sql", "doubt"),
    [
        ("SELECT string_agg(n, ',' ORDER BY n COLLATE \"C\") FROM (SELECT c AS n FROM t {union}) x", "set operation"),
        ("SELECT count(*) FILTER (WHERE n COLLATE \"C\" = 'a') FROM (SELECT c AS n FROM t {union}) x", "set operation"),
        ('WITH RECURSIVE r AS (SELECT c AS n FROM t UNION SELECT n FROM r) SELECT max(n COLLATE "C") FROM r', "set op"),
        ("SELECT max(a COLLATE ci) FROM t", "max() may take any of several equal values"),
        ("SELECT count(*) FROM (SELECT DISTINCT a COLLATE ci FROM t) x", "GROUP BY or DISTINCT"),
        ("SELECT a COLLATE ci, count(*) FROM t GROUP BY 1 ORDER BY 1", "GROUP BY or DISTINCT"),
    ],
)
def test_merge_of_texts_that_a_collation_treats_as_equal_counts_every_column(
    rig: Callable[..., PgRig], sql: str, doubt: str
) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY, a text, c text, note text)")
    ignore_case(own)
    own.run("ALTER TABLE t ALTER c TYPE text COLLATE ci")
    for union in ("UNION SELECT c FROM t", "INTERSECT SELECT c FROM t", "EXCEPT SELECT a COLLATE ci FROM t"):
        found = own.source.analyse(sql.format(union=union))
        assert any(doubt in each for each in found.doubts), found.doubts
        assert [each.columns for each in found.dependencies] == [None]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT a COLLATE ci FROM t ORDER BY a COLLATE ci LIMIT 1",
        "SELECT string_agg(a COLLATE ci, ',' ORDER BY a COLLATE ci) FROM t",
        "SELECT ARRAY(SELECT a COLLATE ci FROM t ORDER BY 1)",
    ],
)
def test_order_by_a_collation_that_treats_texts_as_equal_is_not_total(rig: Callable[..., PgRig], sql: str) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY, a text)")
    ignore_case(own)
    assert own.source.analyse(sql.replace("ci", '"C"')).is_total
    assert not own.source.analyse(sql).is_cacheable


@pytest.mark.parametrize("call", ["string_agg(t.a, ',' ORDER BY {})", "array_agg(t.a ORDER BY {})"])
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT (SELECT {call}) FROM t",
        "SELECT (SELECT {call} FROM u WHERE u.id = 1) FROM t",
        "SELECT n, (SELECT {call}) FROM t GROUP BY n ORDER BY n",
        "SELECT n, (SELECT {call} FROM u WHERE u.id = 1) FROM t GROUP BY n ORDER BY n",
    ],
)
def test_aggregate_of_an_enclosing_query_is_not_ordered_by_keys_of_the_subquery(
    rig: Callable[..., PgRig], sql: str, call: str
) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY, a text, n int)", "CREATE TABLE u(id int PRIMARY KEY)")
    found = own.source.analyse(sql.format(call=call.format("t.n")))
    assert any("takes rows in any order" in each for each in found.volatile), found.volatile
    assert own.source.analyse(sql.format(call=call.format("t.a"))).is_cacheable  # all that it takes is sorted


def test_weak_mode_of_isn_is_no_cacheable_fact_and_set_by_owners_only(rig: Callable[..., PgRig]) -> None:
    own = rig("CREATE TABLE t(id int PRIMARY KEY)")
    extension(own, "isn")
    own.run("ALTER TABLE t ADD i isbn")
    for sql in ("SELECT isn_weak()", "SELECT id FROM t WHERE i = $1 ORDER BY id", "SELECT i FROM t ORDER BY id"):
        assert not own.source.analyse(sql).is_cacheable
    assert own.source.analyse("SELECT isn_weak(true)").calls == ("isn_weak",)
    for role in (VIEWER, EDITOR):
        with pytest.raises(Forbidden, match="needs the role owner"):
            refuse(("isn_weak",), role)
    with pytest.raises(NotSupported, match="more than its arguments"):
        own.source.condition(own.source.describe()["t"], "isn_weak(true)")
