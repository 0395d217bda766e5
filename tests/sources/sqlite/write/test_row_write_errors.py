"""Errors of row operations: the names of tables that they contain or suggest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sources.sqlite_source import Rig
from tests.suite.deadlines import PATIENCE

from headwater.errors import InvalidRequest, NotFound
from headwater.sources.write import Session

Attach = Callable[..., Rig]
STEPS: tuple[Callable[[Session, str], object], ...] = (
    lambda session, table: session.insert(table, [{"id": 2}]),
    lambda session, table: session.update(table, None, {"v": 1}, None),
    lambda session, table: session.delete(table, None, None),
)


@pytest.mark.parametrize("step", [*STEPS, lambda session, table: session.select(table, None)])
def test_missing_table_is_reported_without_the_name_of_another(
    rig: Attach, step: Callable[[Session, str], object]
) -> None:
    r = rig("CREATE TABLE payroll_secret(id INTEGER PRIMARY KEY)")
    with pytest.raises(NotFound) as found:
        r.source.write(lambda session: step(session, "payroll")).result(PATIENCE)
    assert found.value.message == "there is no table 'payroll'"
    assert found.value.hint == "See schema.list_tables."


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("since", "message"),
    [
        ("ALTER TABLE audit ADD COLUMN w", "table audit has 3 columns but 2 values were supplied"),
        ("DROP TABLE audit", "no such table: main.audit"),
    ],
)
def test_error_of_an_outdated_trigger_is_marked_as_naming_tables(
    rig: Attach, step: Callable[[Session, str], object], since: str, message: str
) -> None:
    body = "BEGIN INSERT INTO audit VALUES (NULL, 1); END"
    r = rig(
        "CREATE TABLE t(id INTEGER PRIMARY KEY, v)",
        "INSERT INTO t VALUES (1, 1)",
        "CREATE TABLE audit(id INTEGER PRIMARY KEY, v)",
        *(f"CREATE TRIGGER {op}_copy AFTER {op} ON t {body}" for op in ("INSERT", "UPDATE", "DELETE")),
        since,
    )
    with pytest.raises(InvalidRequest) as found:
        r.source.write(lambda session: step(session, "t")).result(PATIENCE)
    assert found.value.message == message
    assert found.value.names_tables


def test_error_of_a_query_is_not_marked_as_naming_tables(rig: Attach) -> None:
    r = rig("CREATE TABLE t(id INTEGER PRIMARY KEY, v)", "INSERT INTO t VALUES (1, '{')")
    with pytest.raises(InvalidRequest, match="malformed JSON") as found:
        r.source.write(lambda session: session.execute("SELECT json_extract(v, '$.a') FROM t")).result(PATIENCE)
    assert not found.value.names_tables
