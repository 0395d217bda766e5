"""Names and stored texts of queries, and options that a transaction refuses (WIRE §1, §6)."""

from __future__ import annotations

import pytest
from tests.conformance.live_server import Live


def test_query_text_with_extra_blanks_or_semicolons_has_the_same_id(server: Live, table: str) -> None:
    plain = f"SELECT id FROM {table}"
    first = server.ok("query.prepare", sql=plain)
    for text in (f"{plain};", f"  {plain}", f"\n\t{plain} ; ;\r\n"):
        again = server.ok("query.prepare", sql=text)
        assert again == first and again["canonical"] == {"sql": plain}
        assert server.ok("query.explain", sql=text)["query_id"] == first["query_id"]
    assert server.ok("query.prepare", sql=plain.lower())["query_id"] != first["query_id"]
    text = f"SELECT ';' FROM {table} -- x;"
    assert server.ok("query.prepare", sql=text)["canonical"] == {"sql": f"SELECT ';' FROM {table}"}
    for none in (";", " ", ""):
        assert server.error("query.prepare", sql=none)["code"] == "invalid_request"


def test_prepared_query_keeps_its_latest_name(server: Live, table: str) -> None:
    sql = f"SELECT total FROM {table}"
    assert server.ok("query.prepare", sql=sql, name="one")["name"] == "one"
    assert server.ok("query.prepare", sql=sql, name="two")["name"] == "two"
    assert server.ok("query.prepare", sql=sql)["name"] == "two"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("if_none_match", '"x"'),
        ("min_causality", {"format": "vector_clock_v2", "deps": [{"table": "main.t", "v": 9**9}]}),
    ],
)
def test_cache_options_in_a_transaction_are_refused_by_name(server: Live, table: str, name: str, value: object) -> None:
    tx = server.ok("tx.begin", read_only=True)["tx"]
    error = server.error("query.select", sql=f"SELECT id FROM {table}", tx=tx, cache={name: value})
    assert error["code"] == "invalid_request" and f"cache.{name}" in error["message"]
    found = server.ok("query.select", sql=f"SELECT id FROM {table}", tx=tx, cache={"want_etag": False})
    assert found["etag"] is None
    server.ok("tx.rollback", tx=tx)
