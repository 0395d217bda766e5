"""Cost of queries: preparing one, a patch against the whole answer, and the time from a commit to an invalidation."""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

from bench.sides import folder, server, versions
from headwater.client import Client

ROWS = 1_000
QUERIES = {
    "one table": "SELECT id, v FROM t WHERE k = ? ORDER BY id",
    "a join": "SELECT t.id, u.w FROM t JOIN u ON u.id = t.k WHERE u.w > ? ORDER BY t.id LIMIT 50",
    "a view and a CTE": "WITH x AS (SELECT k, count(*) n FROM view_t GROUP BY k) SELECT k, n FROM x WHERE k = ?",
}


def get(url: str, **headers: str) -> tuple[int, str, bytes]:
    """Return status, ETag and body of an answer; an error status has an empty body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=named)) as answer:
            return answer.status, answer.headers.get("ETag", ""), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("ETag", ""), b""


def set_up(client: Client) -> None:
    for sql in (
        "CREATE TABLE t(id INTEGER PRIMARY KEY, k INTEGER, v TEXT)",
        "CREATE TABLE u(id INTEGER PRIMARY KEY, w INTEGER)",
        "CREATE VIEW view_t AS SELECT * FROM t WHERE v IS NOT NULL",
        f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {ROWS})"
        " INSERT INTO t SELECT i, 1, printf('a value of row %d', i) FROM n",
    ):
        client.call("sql.exec", sql=sql)


def preparing(client: Client, times: int = 50) -> None:
    """Print the median time of `query.explain` for each query; every text is new, so no analysis is cached."""
    for name, sql in QUERIES.items():
        took = []
        for number in range(times):
            started = time.perf_counter()
            client.call("query.explain", sql=f"{sql} -- {number}")
            took.append(time.perf_counter() - started)
        print(f"  prepare, {name:18} {statistics.median(took) * 1000:6.2f} ms")


def patching(client: Client, url: str, times: int = 30) -> None:
    """Change one row of a thousand; print time and size of the patch and of the whole answer."""
    query = client.call("query.prepare", sql=QUERIES["one table"])["query_id"]
    address = f"{url}/api/v1/q/{query}?args=[1]"
    sides = {"whole": {}, "patch": {"A_IM": "headwater-rows"}}
    took: dict[str, list[float]] = {name: [] for name in sides}
    size = dict.fromkeys(sides, 0)
    tags = {name: get(address, **headers)[1] for name, headers in sides.items()}
    for number in range(times):
        client.call("sql.exec", sql="UPDATE t SET v = ? WHERE id = 500", args=[f"changed {number}"])
        for name, headers in sides.items():
            started = time.perf_counter()
            status, tags[name], body = get(address, If_None_Match=tags[name], **headers)
            took[name].append(time.perf_counter() - started)
            size[name] = len(body)
            if status != {"whole": 200, "patch": 226}[name]:
                raise RuntimeError(f"{name}: {status}")
    for name in sides:
        print(f"  {name:6} of {ROWS:,} rows   {statistics.median(took[name]) * 1000:6.2f} ms   {size[name]:>8,} bytes")


def hearing(client: Client, url: str, times: int = 300) -> None:
    """Print the time from sending a write to its invalidation on an open stream."""
    query = client.call("query.prepare", sql=QUERIES["one table"])["query_id"]
    heard: dict[int, float] = {}
    ready = threading.Event()

    def listen() -> None:
        with urllib.request.urlopen(f"{url}/api/v1/q/{query}/events?args={quote('[1]')}") as stream:
            ready.set()
            for line in stream:
                if line.startswith(b"data: ") and b'"new_etag"' in line:
                    heard[json.loads(line[6:])["offset"]] = time.perf_counter()
                    if len(heard) == times:
                        return

    thread = threading.Thread(target=listen)
    thread.start()
    ready.wait()
    sent: dict[int, float] = {}
    for number in range(times):
        started = time.perf_counter()
        answer = client.call("sql.exec", sql="UPDATE t SET v = ? WHERE id = 7", args=[f"again {number}"])
        sent[answer["result"]["causality"]["deps"][0]["v"]] = started
        time.sleep(0.005)
    thread.join(30)
    delays = sorted(heard[offset] - sent[offset] for offset in sent if offset in heard)
    p50, p99 = (delays[int(len(delays) * share)] * 1000 for share in (0.5, 0.99))
    print(f"  write to invalidation ({len(delays)} of {times} heard)   p50 {p50:.2f} ms   p99 {p99:.2f} ms")


def main() -> None:
    """Print all three measurements."""
    print(versions())
    print("asking: no bars; both sides of a pair are measured in turns")
    with folder() as place, server(Path(place) / "data") as (url, _), Client(url) as client:
        set_up(client)
        preparing(client)
        patching(client, url)
        hearing(client, url)


if __name__ == "__main__":
    sys.exit(main())
