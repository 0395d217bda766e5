"""Answers that the plan decides: by an approximate index, or by the order in which rows reach an aggregate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sources.postgres.pg_source import PgRig

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
