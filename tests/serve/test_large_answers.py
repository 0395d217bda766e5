"""Large answers over HTTP and the gateway: complete within the limit, refused beyond it, without blocking others."""

from __future__ import annotations

import base64
import threading
from typing import Any

import pytest
from tests.conformance.gateway_client import GatewayClient
from tests.queries.open_databases import Whole
from tests.serve.server_fixture import Client
from tests.suite.deadlines import PATIENCE, wait_until

from headwater.model.work.answer_limits import MEMORY

MIB = 1 << 20
TEXT = "SELECT k, hex(zeroblob(10485760)) AS v FROM t"
BYTES = "SELECT k, zeroblob(10485760) AS v FROM t"
PAST = "SELECT " + ", ".join(["zeroblob(60000000)"] * 10)


@pytest.fixture
def filled(files: Whole, client: Client) -> Client:
    files.run("INSERT INTO t VALUES (1, 'a')")
    return client


def query(client: Client, sql: str) -> str:
    return f"/api/v1/q/{client.ok('query.prepare', sql=sql)['query_id']}"


def test_large_text_is_complete_in_every_format(filled: Client) -> None:
    text = "0" * (20 * MIB)
    place = query(filled, TEXT)
    lits = filled.http.get(place).json()["data"]["rows"]
    assert lits == [[{"t": "i64", "v": 1}, {"t": "str", "v": text}]]
    objects = filled.http.get(place, headers={"accept": "application/vnd.headwater.objects+json"}).json()
    assert objects["data"]["rows"] == [{"k": lits[0][0], "v": lits[0][1]}]
    table = filled.http.get(place, headers={"accept": "text/csv"})
    assert table.text == f"k,v\r\n1,{text}\r\n"
    assert int(table.headers["content-length"]) == len(table.content)
    assert filled.ok("sql.exec", sql=TEXT)["result"]["data"]["rows"] == lits
    assert filled.ok("query.select", sql=TEXT)["data"]["rows"] == lits


def test_large_blob_is_returned_whole(filled: Client) -> None:
    ((_, lit),) = filled.ok("sql.exec", sql=BYTES)["result"]["data"]["rows"]
    assert base64.b64decode(lit["b64"]) == bytes(10 * MIB)


def test_head_of_a_large_answer_has_no_body(filled: Client) -> None:
    answer = filled.http.head(query(filled, TEXT))
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 20 * MIB


def test_answer_past_the_limit_is_refused_everywhere(filled: Client) -> None:
    for method in ("sql.exec", "query.select"):
        error = filled.error(method, sql=PAST)
        assert error["code"] == "answer_too_large" and error["details"]["hint"]
    refused = filled.http.get(query(filled, PAST))
    assert (refused.status_code, refused.json()["code"]) == (413, "answer_too_large")
    gateway = GatewayClient(str(filled.http.base_url))
    assert gateway.error("sql", {"query": PAST})["code"] == "answer_too_large"
    assert gateway.error("sql", {"query": TEXT})["code"] == "answer_too_large", "a message is at most 16 MiB"
    gateway.close()
    assert filled.rows("SELECT 1") == [[1]]


def test_large_answer_has_no_patch(filled: Client) -> None:
    answer = filled.http.get(query(filled, TEXT), headers={"a-im": "headwater-rows"})
    assert answer.status_code == 200
    assert filled.error("query.patch", sql=TEXT)["code"] == "not_supported"


def test_memory_of_answers_is_free_when_they_are_sent(filled: Client) -> None:
    filled.ok("sql.exec", sql=TEXT)
    filled.error("sql.exec", sql=PAST)
    wait_until(lambda: MEMORY.used == 0)
    assert "headwater_answer_memory_bytes 0.0" in filled.http.get("/metrics").text


def test_health_is_answered_while_large_answers_are_made(filled: Client) -> None:
    """Not how fast: that the interpreter and the event loop are free in between, again and again."""
    done: list[Any] = []

    def ask() -> None:
        done.append(filled.rpc("sql.exec", sql=TEXT)["ok"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    answered = 0
    while any(thread.is_alive() for thread in threads):
        assert filled.http.get("/healthz").status_code == 200
        answered += 1
    for thread in threads:
        thread.join(PATIENCE)
    assert len(done) == 4 and any(done)
    assert answered >= 20, "each of the answers took the server for itself"
