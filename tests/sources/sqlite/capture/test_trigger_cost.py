"""The cost of capture for a writer does not grow with the table: no trigger of ours scans one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from tests.sources.sqlite.capture.test_conflicts import KEYS
from tests.sources.sqlite_source import Rig

from headwater.sources.sqlite.capture.triggers import STASHED

Attach = Callable[..., Rig]

INDEXES = [
    "CREATE UNIQUE INDEX i ON t(u COLLATE NOCASE)",
    "CREATE UNIQUE INDEX i ON t(lower(u))",
    "CREATE UNIQUE INDEX i ON t(u = '1', v)",
    "CREATE UNIQUE INDEX i ON t(u, v) WHERE v IS NOT NULL",
    "CREATE UNIQUE INDEX i ON t(u COLLATE NOCASE DESC, v)",
]
TABLES = {name: (create,) for name, create in KEYS.items()} | {
    index: ("CREATE TABLE t(k INTEGER PRIMARY KEY, u TEXT, v)", index) for index in INDEXES
}
TABLES["nocase unique beside a text key"] = (
    "CREATE TABLE t(k TEXT PRIMARY KEY, u TEXT, v) WITHOUT ROWID",
    "CREATE UNIQUE INDEX i ON t(u COLLATE NOCASE)",
)
TABLES["rules on a numbered key"] = (
    "CREATE TABLE t(k INTEGER PRIMARY KEY AUTOINCREMENT, u, v, g AS (k || u) UNIQUE, h AS (k || v) STORED UNIQUE)",
    "CREATE UNIQUE INDEX i ON t(k + 7)",
)
TABLES["parent of itself"] = ("CREATE TABLE t(k INTEGER PRIMARY KEY, u UNIQUE, v, p REFERENCES t ON DELETE SET NULL)",)

WHERE = {"no key": "rowid = 3", "no key but unique": "rowid = 3", "composite without rowid": "u = 'u3'"}


def steps(path: Path, sql: str) -> int:
    """Return how many instructions SQLite runs for `sql`, in tens."""
    count = 0

    def tick() -> bool:
        nonlocal count
        count += 1
        return False

    db = apsw.Connection(str(path))
    try:
        db.execute("BEGIN IMMEDIATE")
        db.execute(f"EXPLAIN {sql}").fetchall()  # reading the schema is not counted
        db.set_progress_handler(tick, 10)
        db.execute(sql)
        db.set_progress_handler(None)
        db.execute("ROLLBACK")
    finally:
        db.close()
    return count


@pytest.mark.parametrize("then", ["NOTHING", "UPDATE SET v = NULL"])
@pytest.mark.parametrize("name", ["unique", "parent of itself"])
def test_ignored_and_updated_rows_do_not_fill_the_stash(rig: Attach, database: Path, name: str, then: str) -> None:
    r = rig(*TABLES[name])
    numbers = "WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500)"
    for _ in range(2):
        r.foreign.run(f"{numbers} INSERT INTO t(k, u) SELECT i, i FROM n WHERE 1 ON CONFLICT DO {then}")
    assert r.foreign.run("SELECT count(*) FROM _headwater_stash")[0][0] <= STASHED + 1
    assert steps(database, "INSERT INTO t(k, u) VALUES (-5, 'new')") < 100
    r.check()


@pytest.mark.parametrize("name", TABLES)
def test_write_costs_the_same_in_a_large_table(rig: Attach, database: Path, name: str) -> None:
    r = rig(*TABLES[name])
    statements = [
        "INSERT INTO t(k, u, v) VALUES (-5, 'new', 'new')",
        "REPLACE INTO t(k, u, v) VALUES (1, 'u2', 'v3')",
        f"UPDATE OR REPLACE t SET k = -7, u = 'u4' WHERE {WHERE.get(name, 'k = 3')}",
    ]
    if name == "rules on a numbered key":
        statements.append("REPLACE INTO t(u, v) VALUES ('new', 'new')")
    costs = []
    for low, high in ((1, 10), (11, 3000)):
        r.foreign.run(
            f"WITH n(i) AS (SELECT {low} UNION ALL SELECT i + 1 FROM n WHERE i < {high}) "
            "INSERT INTO t(k, u, v) SELECT i, 'u' || i, 'v' || i FROM n"
        )
        costs.append([steps(database, statement) for statement in statements])
    small, large = costs
    assert all(b < 2 * a + 30 for a, b in zip(small, large, strict=True)), (small, large)
