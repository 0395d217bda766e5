"""Errors of row operations: the names of tables that they contain or suggest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.sources.sqlite_source import Rig
from tests.suite.deadlines import PATIENCE

from headwater.errors import NotFound
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
