"""Requests with very many values: refused, or converted outside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import Client, serving
from tests.suite.deadlines import PATIENCE

from headwater.errors import InvalidRequest
from headwater.queries import queries
from headwater.serve.rpc import query_params
from headwater.serve.rpc.envelope import LARGE
from headwater.serve.rpc.query_params import MAX_ARGS, values_of


def test_more_arguments_than_can_be_bound_are_refused() -> None:
    assert len(values_of([1] * MAX_ARGS)) == MAX_ARGS
    for many in ([1] * (MAX_ARGS + 1), {str(number): 1 for number in range(MAX_ARGS + 1)}):
        with pytest.raises(InvalidRequest, match="at most 32766"):
            values_of(many)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Whole(tmp_path_factory.mktemp("arguments")) as databases, serving(databases) as found:
        found.ok("sql.exec", sql="CREATE TABLE t(id INTEGER PRIMARY KEY, v TEXT)")
        yield found


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the set of ids of the threads that convert arguments or normalise queries."""
    found: set[int] = set()

    def noted(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(given: Any) -> Any:
            found.add(threading.get_ident())
            return function(given)

        return call

    monkeypatch.setattr(query_params, "from_json", noted(query_params.from_json))
    monkeypatch.setattr(queries, "normal_form", noted(queries.normal_form))
    return found


def loop_thread(client: Client) -> int:
    async def ident() -> int:
        return threading.get_ident()

    return asyncio.run_coroutine_threadsafe(ident(), client.loop).result(PATIENCE)


@pytest.mark.parametrize(
    "method",
    ["query.select", "query.patch", "query.execute_prepared", "data.update"],
)
def test_many_arguments_are_converted_in_a_thread(client: Client, threads: set[int], method: str) -> None:
    sql = f"SELECT v FROM t WHERE v IN ({','.join('?' * 900)})"
    args: dict[str, Any] = {"args": ["x" * 10] * 900}
    if method == "data.update":
        args |= {"table": {"table": "t"}, "where": {"eq": [{"col": "id"}, 1]}, "set": {"v": "x"}}
    elif method in ("query.select", "query.patch"):
        args |= {"sql": sql}
    else:
        args |= {"query_id": client.ok("query.prepare", sql=sql)["query_id"]}
        threads.clear()
    client.rpc(method, **args)
    assert threads and loop_thread(client) not in threads


@pytest.mark.parametrize("method", ["query.select", "query.patch", "query.prepare", "query.explain"])
def test_long_query_is_normalised_in_a_thread(client: Client, threads: set[int], method: str) -> None:
    client.rpc(method, sql=f"SELECT {'1 + ' * 5_000} 1")
    assert threads and loop_thread(client) not in threads


@pytest.mark.parametrize("method", ["query.select", "query.subscribe", "cdc.subscribe_query"])
@pytest.mark.parametrize("args", [[1] * (MAX_ARGS + 1), {f"a{number}": 1 for number in range(MAX_ARGS + 1)}])
def test_too_many_arguments_are_refused_by_every_method(client: Client, method: str, args: Any) -> None:
    query = {"sql": "SELECT 1"} if method == "query.select" else {"query_id": "q_none"}
    error = client.error(method, args=args, **query)
    assert (error["code"], f"at most {MAX_ARGS}" in error["message"]) == ("invalid_request", True)


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


def test_long_arguments_of_a_query_feed_are_refused(client: Client) -> None:
    query = client.ok("query.prepare", sql="SELECT v FROM t WHERE v = ?")["query_id"]
    for args in (["x" * 70_000], [{"t": "dec", "v": "1e1000"}] * 100):
        error = client.error("query.subscribe", query_id=query, args=args)
        assert error["code"] == "invalid_request" and "address of the feed" in error["details"]["hint"]
