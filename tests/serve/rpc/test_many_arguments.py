"""Requests with very many values: refused or converted away from the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import serving

from headwater.errors import InvalidRequest
from headwater.serve.rpc.envelope import LARGE
from headwater.serve.rpc.query_params import MAX_ARGS, values_of


def test_more_arguments_than_can_be_bound_are_refused() -> None:
    assert len(values_of([1] * MAX_ARGS)) == MAX_ARGS
    for many in ([1] * (MAX_ARGS + 1), {str(number): 1 for number in range(MAX_ARGS + 1)}):
        with pytest.raises(InvalidRequest, match="at most 32766"):
            values_of(many)  # type: ignore[arg-type]


def test_large_insert_is_stored_whole(tmp_path: Path) -> None:
    rows = [{"id": number, "v": "x" * 100} for number in range(2000)]
    with Whole(tmp_path) as databases, serving(databases) as client:
        client.ok("sql.exec", sql="CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
        assert len(str(rows)) > LARGE
        client.ok("data.insert", into={"table": "t"}, rows=rows)
        found = client.ok("sql.exec", sql="SELECT count(*), sum(length(v)) FROM t")
        assert "2000" in str(found) and "200000" in str(found)
        wrong = client.rpc("data.insert", into={"table": "t"}, rows=[{"id": 1, "v": {"t": "i64", "v": "x" * LARGE}}])
        assert wrong["error"]["code"] == "invalid_request"
