"""Failures found by the kit, or by reading for it, each as a case."""

from __future__ import annotations

import pytest
from tests.soundness.differential_checker import Case
from tests.soundness.grammar import Query
from tests.soundness.schemas import Step
from tests.soundness.shrink import failure

T = "CREATE TABLE t(k INTEGER PRIMARY KEY, a INTEGER, b INTEGER)"
U = "CREATE TABLE u(k INTEGER PRIMARY KEY, x INTEGER)"
V = "CREATE TABLE v(k INTEGER PRIMARY KEY, a INTEGER)"
ROWS = [
    "INSERT INTO t VALUES (1, 5, 1), (2, 7, 2), (3, NULL, 3)",
    "INSERT INTO u VALUES (1, 1), (5, 5), (7, 7)",
    "INSERT INTO v VALUES (1, 5), (2, 7), (3, 9)",
]
EXISTS = "EXISTS (SELECT 1 FROM u WHERE u.k = t.a)"

FOUND = {
    # The authorizer tells neither the columns that USING and NATURAL compare, nor their table.
    "using": ("SELECT t.b FROM t JOIN u USING (k)", "DELETE FROM u WHERE k = 1"),
    "left using": ("SELECT count(*) FROM t LEFT JOIN v USING (a)", "INSERT INTO v VALUES (9, 5)"),
    "natural": ("SELECT t.b FROM t NATURAL JOIN u", "DELETE FROM u WHERE k = 1"),
    "natural right": ("SELECT t.b FROM t NATURAL RIGHT JOIN u", "INSERT INTO u VALUES (9, 9)"),
    "using in a subquery": (
        "SELECT k FROM t WHERE EXISTS (SELECT v.k FROM v JOIN u USING (k) WHERE v.a = t.a)",
        "DELETE FROM u WHERE k = 1",
    ),
    # As a value, 5 IN (…, NULL) is not what 5 IN (…) is.
    "in as a value": ("SELECT k, 6 IN (SELECT x FROM u) FROM t", "INSERT INTO u VALUES (9, NULL)"),
    "in of a known value": ("SELECT k, b IN (SELECT x FROM u) FROM t WHERE b = 2", "INSERT INTO u VALUES (9, NULL)"),
    "ordered by in": (
        "SELECT k, a FROM t WHERE a = 7 ORDER BY a IN (SELECT x + 1 FROM u), k",
        "INSERT INTO u VALUES (9, NULL)",
    ),
    "having in": (
        "SELECT a FROM t WHERE a = 7 GROUP BY a HAVING (a IN (SELECT x FROM u WHERE k < 7)) IS NULL",
        "UPDATE u SET x = NULL WHERE k = 1",
    ),
    # Who loses a partner by a subquery in an inner join's ON is made up as NULL by the outer join above it.
    "on below a right join": (
        f"SELECT t.k, v.k FROM t JOIN u AS w ON w.k = 1 AND {EXISTS} RIGHT JOIN v ON v.a = t.a"
        " WHERE t.a IS NULL OR t.a = 5",
        "DELETE FROM u WHERE k = 7",
    ),
    "on below a full join": (
        f"SELECT t.k, v.k FROM t JOIN u AS w ON w.k = 1 AND {EXISTS} FULL JOIN v ON v.a = t.a"
        " WHERE coalesce(t.a, 5) = 5 AND (t.a = 5 OR t.a IS NULL)",
        "DELETE FROM u WHERE k = 7",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_fixed_unsound_case_passes(name: str) -> None:
    query, write = FOUND[name]
    for foreign in (False, True):
        case = Case([T, U, V, *ROWS], [Query(query, {})], [Step([write], foreign)])
        assert not failure(case), failure(case)
