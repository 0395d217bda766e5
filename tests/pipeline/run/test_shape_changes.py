"""A whole pipeline of a table whose columns change: no value is lost or put under another column's name."""

from __future__ import annotations

import pytest
from tests.conformance.live_server import Live
from tests.pipeline.lakes import DELTA, Lake, Watching, in_order

from headwater.errors import SchemaChanged
from headwater.pipeline.run.spec import PipelineSpec


def test_schema_change_is_followed_ignored_or_refused_by_policy(lake: Lake, server: Live) -> None:
    shapes = {"evolve": "", "pin": 'schema = "pin"', "stay": 'schema = "fail"'}
    for name in shapes:
        server.sql(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, v TEXT, x TEXT)")
        server.sql(f"INSERT INTO {name} VALUES (1, 'a', 'x'), (2, 'b', 'y'), (3, 'c', 'z')")
    assert lake.run(lake.spec(**shapes)).is_good
    for name in shapes:
        server.sql(f"UPDATE {name} SET v = 'before' WHERE id = 1")
        server.sql(f"ALTER TABLE {name} ADD COLUMN w TEXT")
        server.sql(f"ALTER TABLE {name} DROP COLUMN x")
        server.sql(f"UPDATE {name} SET v = 'after', w = 'new' WHERE id = 2")
    watcher = Watching()
    done = {each.task.table: each.error for each in lake.run(lake.spec(**shapes), watcher).tables}
    assert (done["evolve"], done["pin"], watcher.reasons) == (None, None, [])
    assert isinstance(done["stay"], SchemaChanged) and lake.task("stay").error.startswith("schema_changed")
    held = lake.rows("evolve")
    assert [row.pop("x") for row in held] == ["x", None, "z"]  # it stays where it was
    assert in_order(held) == lake.source("evolve")
    assert [row["v"] for row in lake.rows("pin")] == ["before", "after", "c"] and "w" not in lake.rows("pin")[0]
    server.sql("INSERT INTO pin VALUES (4, 'd', 'new')")
    server.sql("ALTER TABLE evolve ADD COLUMN d TEXT DEFAULT 'filled'")  # no change tells that of each row
    watcher = Watching()
    del shapes["stay"]
    summary = lake.run(lake.spec(**shapes), watcher, then_verify=True)
    assert summary.is_good and watcher.reasons == ["schema_changed"] and lake.is_equal("evolve")


SQL = 'kind = "sql"\ntable = "t"\nurl = "sqlite:///{path}"'


def carried(lake: Lake, kind: str, columns: str, rows: str) -> PipelineSpec:
    """Carry a table t with these columns beside its id and these rows into a sink of that kind; return the spec."""
    lake.server.sql(f"CREATE TABLE t (id INTEGER PRIMARY KEY, {columns})")
    lake.server.sql(f"INSERT INTO t VALUES {rows}")
    spec = lake.spec(sink=DELTA if kind == "delta" else SQL.format(path=lake.folder / "t.sqlite"))
    lake.carry(spec)
    return spec


@pytest.mark.parametrize("kind", ["delta", "sql"])
def test_column_renamed_to_a_dropped_name_between_runs_is_read_again(kind: str, lake: Lake, server: Live) -> None:
    """The first and the last table version have equal names: only those between show that the column differs."""
    spec = carried(lake, kind, "price INTEGER", "(1, 100), (2, 200), (3, NULL)")
    server.sql("UPDATE t SET price = 150 WHERE id = 1")
    server.sql("ALTER TABLE t ADD COLUMN price_new INTEGER")
    server.sql("UPDATE t SET price_new = price * 10")
    server.sql("ALTER TABLE t DROP COLUMN price")
    server.sql("ALTER TABLE t RENAME COLUMN price_new TO price")
    server.sql("INSERT INTO t VALUES (4, 4)")
    watcher = Watching()
    lake.carry(spec, watcher)
    assert watcher.reasons == ["schema_changed"] and watcher.errors == []
    assert lake.verify(spec).is_good
    if kind == "delta":
        assert [(row["id"], row["price"]) for row in lake.source()] == [(1, 1500), (2, 2000), (3, None), (4, 4)]
        held = lake.rows()
        assert [row.pop("price_new", None) for row in held] == [None] * 4
        assert in_order(held) == lake.source()


@pytest.mark.parametrize("often", [False, True])
def test_dropped_pinned_column_is_not_filled_from_a_new_column_of_its_name(
    often: bool, lake: Lake, server: Live
) -> None:
    server.sql("CREATE TABLE t (id INTEGER PRIMARY KEY, price INTEGER, v TEXT)")
    server.sql("INSERT INTO t VALUES (1, 100, 'a'), (2, 200, 'b')")
    spec = lake.spec(t='schema = "pin"')
    lake.carry(spec)
    for statement in (
        "UPDATE t SET price = 150 WHERE id = 1",
        "ALTER TABLE t ADD COLUMN price_new INTEGER",
        "UPDATE t SET price_new = price * 10",
        "ALTER TABLE t DROP COLUMN price",
        "ALTER TABLE t RENAME COLUMN price_new TO price",
        "UPDATE t SET v = 'c', price = 7 WHERE id = 2",
        "INSERT INTO t VALUES (3, 'd', 3)",
    ):
        server.sql(statement)
        if often:
            lake.carry(spec)
    lake.carry(spec)
    held = [(row["id"], row["price"], row["v"]) for row in lake.rows()]
    assert held == [(1, 150, "a"), (2, None, "c"), (3, None, "d")]
    assert lake.verify(spec).is_good


@pytest.mark.parametrize("kind", ["delta", "sql"])
def test_dropped_and_readded_column_holds_no_old_values(kind: str, lake: Lake, server: Live) -> None:
    spec = carried(lake, kind, "v TEXT, x TEXT", "(1, 'a', 'old'), (2, 'b', NULL)")
    watcher = Watching()
    server.sql("ALTER TABLE t DROP COLUMN x")
    lake.carry(spec, watcher)
    assert watcher.reasons == []
    server.sql("ALTER TABLE t ADD COLUMN x TEXT")
    server.sql("UPDATE t SET x = 'new' WHERE id = 2")
    lake.carry(spec, watcher)
    assert watcher.reasons == ["schema_changed"]
    assert lake.verify(spec).is_good
    assert kind == "sql" or lake.is_equal()
