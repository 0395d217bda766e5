"""nginx and Varnish in front: they revalidate before every use, get 304, and never serve an answer that a write made
stale.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from tests.caches.conftest import PUBLIC
from tests.caches.proxy_processes import Front
from tests.guarantees.server_process import ServerProcess
from tests.soundness.counters import PLAIN, SIZE, Counters, rpc
from tests.suite.deadlines import wait_until

from headwater.queries.etag.causality import from_json, to_header

pytestmark = pytest.mark.slow
Serve = Callable[..., ServerProcess]
Before = Callable[[ServerProcess], Front]
TABLE = "CREATE TABLE orders (id INTEGER PRIMARY KEY, total REAL)"
TOKEN = "a-credential-of-the-tests"


def number(server: ServerProcess, name: str, **headers: str) -> int:
    """Return the value of one metric."""
    lines = httpx.get(f"{server.url}/metrics", headers=headers).text.splitlines()
    return int(float(next(line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} "))))


def not_modified(server: ServerProcess) -> int:
    return number(server, "headwater_query_not_modified_total")


def executed(server: ServerProcess) -> int:
    return number(server, "headwater_query_executed_total")


def orders(server: ServerProcess, sql: str = "SELECT id, total FROM orders ORDER BY id") -> str:
    """Create a table with a row; return the path of a query over it."""
    rpc(server.url, "sql.exec", sql=TABLE)
    rpc(server.url, "sql.exec", sql="INSERT INTO orders VALUES (1, 9.5)")
    tagged(f"{server.url}/api/v1/q/{rpc(server.url, 'query.prepare', sql='SELECT count(*) FROM orders')['query_id']}")
    return f"/api/v1/q/{rpc(server.url, 'query.prepare', sql=sql)['query_id']}"


def tagged(url: str, **headers: str) -> str:
    """Return the tag of an answer, once the log has everything committed before, so that it has one."""
    wait_until(lambda: "etag" in httpx.get(url, headers=headers).headers, "an answer with a tag")
    return httpx.get(url, headers=headers).headers["etag"]


def test_cached_answer_is_never_older_than_an_acknowledged_write(serve: Serve, front: Before) -> None:
    server = serve()
    before = front(server)
    counters = Counters(lambda: server.url, server.folder / "main.db", lambda: before.url)
    counters.run(writes=150)
    assert counters.counts["200"] > 10 and counters.counts["304"] > 10, counters.counts
    assert not_modified(server) > 10
    with httpx.Client(headers=PLAIN) as http:
        assert counters.ask(http, counters.questions[0], {}) == SIZE * 150


def test_cached_copy_is_revalidated_each_time_without_an_execution(serve: Serve, front: Before) -> None:
    server = serve()
    before, path = front(server), orders(server)
    first = httpx.get(before.url + path)
    assert first.headers["cache-control"] == "public, no-cache"

    def are_revalidated() -> bool:
        ran, same = executed(server), not_modified(server)
        for _ in range(5):
            again = httpx.get(before.url + path)
            assert (again.status_code, again.content) == (200, first.content)
        return (executed(server), not_modified(server)) == (ran, same + 5)

    wait_until(are_revalidated, "five requests without an execution")  # a server that is held up for 0.25 s executes
    ran = executed(server)
    rpc(server.url, "sql.exec", sql="UPDATE orders SET total = 1.5")
    assert b"1.5" in httpx.get(before.url + path).content
    assert executed(server) == ran + 1


def test_strong_and_weak_etags_of_a_reader_are_answered_with_304(serve: Serve, front: Before) -> None:
    server = serve()
    before, path = front(server), orders(server)
    for coding in ("identity", "gzip"):
        tag = tagged(before.url + path, **{"accept-encoding": coding})
        for sent in (f'"other", {tag}', tag, f"W/{tag.removeprefix('W/')}"):
            asked = {"if-none-match": sent, "accept-encoding": coding}
            through = httpx.get(before.url + path, headers=asked).status_code
            assert through == 304 or ("," in sent and through == 200), (coding, sent)  # Varnish reads no lists
            assert httpx.get(server.url + path, headers=asked).status_code == 304, (coding, sent)
        rpc(server.url, "sql.exec", sql="UPDATE orders SET total = total + 1")
        assert httpx.get(before.url + path, headers=asked).status_code == 200


def test_cached_copy_is_revalidated_after_a_server_kill_without_an_execution(serve: Serve, front: Before) -> None:
    server = serve()
    before, path = front(server), orders(server)
    first = httpx.get(before.url + path)
    server.kill()
    assert httpx.get(before.url + path).status_code >= 502, "nobody can say whether the copy is good"
    server.start()

    def is_confirmed() -> bool:
        ran, same = executed(server), not_modified(server)
        assert httpx.get(before.url + path).content == first.content
        return (executed(server), not_modified(server)) == (ran, same + 1)

    wait_until(is_confirmed, "a request without an execution")  # a server that is held up for 0.25 s executes


def test_cache_keeps_formats_and_arguments_separate(serve: Serve, front: Before) -> None:
    server = serve()
    before, path = front(server), orders(server, "SELECT total FROM orders WHERE id = ?")
    for _ in range(2):
        for args in ("[1]", "[2]"):
            for accept in ("application/json", "text/csv"):
                url, headers = f"{path}?args={args}", {"accept": accept}
                through = httpx.get(before.url + url, headers=headers)
                assert through.headers["content-type"] == accept
                assert through.content == httpx.get(server.url + url, headers=headers).content


def test_private_and_volatile_answers_are_not_cached(serve: Serve, front: Before) -> None:
    server = serve("")
    before, path = front(server), orders(server)
    volatile = f"/api/v1/q/{rpc(server.url, 'query.prepare', sql='SELECT random() FROM orders')['query_id']}"
    for place, says in ((path, "private, no-cache"), (volatile, "no-store")):
        ran = executed(server)
        for _ in range(3):
            assert httpx.get(before.url + place).headers["cache-control"] == says
        assert executed(server) == ran + 3
    assert not_modified(server) == 0


def test_cached_copy_without_a_credential_is_refused(serve: Serve, front: Before) -> None:
    server = serve(f'{PUBLIC}[serve]\ntoken = "{TOKEN}"\n')
    before, known = front(server), {"authorization": f"Bearer {TOKEN}"}
    for sql in (TABLE, "INSERT INTO orders VALUES (1, 9.5)"):
        httpx.post(f"{server.url}/api/v1/sql/exec", headers=known, json={"sql": sql})
    asked = {"id": 1, "method": "query.prepare", "params": {"sql": "SELECT * FROM orders"}}
    found = httpx.post(f"{server.url}/api/v1/rpc", headers=known, json=asked).json()["result"]
    tagged(f"{server.url}/api/v1/q/{found['query_id']}", **known)
    path = f"{before.url}/api/v1/q/{found['query_id']}"
    assert [httpx.get(path, headers=known).status_code for _ in range(2)] == [200, 200]
    assert number(server, "headwater_query_not_modified_total", **known) == 1, "there is a copy"
    for headers in ({}, {"authorization": "Bearer another"}):
        refused = httpx.get(path, headers=headers)
        assert refused.status_code == 401 and b"9.5" not in refused.content
    assert httpx.get(path, headers=known).status_code == 200


def test_request_with_a_causality_header_bypasses_the_cached_copy_and_keeps_it(serve: Serve, front: Before) -> None:
    server = serve()
    before, path = front(server), orders(server)
    httpx.get(before.url + path)
    written = rpc(server.url, "sql.exec", sql="INSERT INTO orders VALUES (2, 2.5)")["result"]["causality"]
    floor = {"x-headwater-causality": to_header(from_json(written))}
    assert b"2.5" in httpx.get(before.url + path, headers=floor).content

    def is_kept() -> bool:
        same = not_modified(server)
        assert len({httpx.get(before.url + path).content for _ in range(3)}) == 1
        return not_modified(server) >= same + 2

    wait_until(is_kept, "two of three requests without an execution")  # a server that is held up for 0.25 s executes


def test_patch_request_through_a_cache_is_answered_with_all_rows(serve: Serve, front: Before) -> None:
    server = serve()
    before, path = front(server), orders(server)
    asked = {"a-im": "headwater-rows"}
    tag = tagged(before.url + path, **asked)
    for total in (1, 2):
        rpc(server.url, "sql.exec", sql=f"UPDATE orders SET total = {total}")
        answer = httpx.get(before.url + path, headers={**asked, "if-none-match": tag})
        assert answer.status_code == 200 and "im" not in answer.headers
        assert answer.json()["data"]["rows"][0][1]["v"] == total
