"""Rows over HTTP on a whole server: no lost update, one winner, changes in the feed, tags valid after a restart."""

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.conformance.live_server import Live
from tests.doc_pages import blocks, page
from tests.suite.deadlines import PATIENCE

WRITERS, ROUNDS = 5, 10


def at_once(server: Live, work: Callable[[httpx.Client, int], None], count: int = WRITERS) -> None:
    """Run `work` in `count` threads that start together, each with its own connection."""
    barrier, failures = threading.Barrier(count), []

    def run(number: int) -> None:
        try:
            with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
                barrier.wait(PATIENCE)
                work(client, number)
        except BaseException as error:  # shown by the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures, failures[0]


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_concurrent_increments_with_if_match_lose_no_update(server: Live, table: str, method: str) -> None:
    url = f"/api/v1/t/main/{table}/1"
    assert server.http.put(url, json={"status": "0", "total": 0}).status_code == 201
    refused = []

    def increment(client: httpx.Client, number: int) -> None:
        done = 0
        while done < ROUNDS:
            seen = client.get(url)
            body = {"total": seen.json()["total"] + 1} | ({"status": f"{number}"} if method == "PUT" else {})
            written = client.request(method, url, json=body, headers={"if-match": seen.headers["etag"]})
            assert written.status_code in (200, 412), written.text
            if written.status_code == 412:
                refused.append(number)
            else:
                done += 1
                assert written.json()["total"] == body["total"]

    at_once(server, increment)
    assert server.http.get(url).json()["total"] == WRITERS * ROUNDS
    print(f"{len(refused)} writes came too late and were told so")


def test_concurrent_creates_of_a_row_succeed_exactly_once(server: Live, table: str) -> None:
    winners: list[tuple[int, str]] = []

    def create(client: httpx.Client, number: int) -> None:
        for key in range(ROUNDS):
            url = f"/api/v1/t/main/{table}/{key}"
            made = client.put(url, json={"status": f"{number}"}, headers={"if-none-match": "*"})
            assert made.status_code in (201, 412), made.text
            if made.status_code == 201:
                winners.append((key, f"{number}"))

    at_once(server, create)
    assert len(winners) == ROUNDS
    found = server.sql(f"SELECT id, status FROM {table} ORDER BY id")
    assert [tuple(row) for row in found] == sorted(winners)


def test_concurrent_deletes_with_the_same_tag_succeed_exactly_once(server: Live, table: str) -> None:
    url = f"/api/v1/t/main/{table}/1"
    tag = server.http.put(url, json={"status": "x"}).headers["etag"]
    statuses: list[int] = []
    at_once(server, lambda client, _: statuses.append(client.delete(url, headers={"if-match": tag}).status_code))
    assert sorted(statuses) == [204] + [404] * (WRITERS - 1)


def test_304_of_a_row_is_never_returned_after_the_row_changed(server: Live, table: str) -> None:
    """Readers who revalidate while writers write: whatever a tag was given with, is what it stands for."""
    url = f"/api/v1/t/main/{table}/1"
    server.http.put(url, json={"status": "0"})
    bodies: dict[str, bytes] = {}
    writing = threading.Event()

    def write(client: httpx.Client) -> None:
        tag = client.get(url).headers["etag"]
        for step in range(1, 61):
            written = client.put(url, json={"status": f"{step % 5}"})
            seen = client.get(url, headers={"if-none-match": tag})
            assert (seen.status_code, seen.content) == (200, written.content), "a write that was acknowledged is seen"
            tag = seen.headers["etag"]
        writing.set()

    def read(client: httpx.Client) -> None:
        tag = ""
        while not writing.is_set():
            got = client.get(url, headers={"if-none-match": tag} if tag else {})
            if got.status_code == 200:
                tag = got.headers["etag"]
                assert bodies.setdefault(tag, got.content) == got.content
            else:
                assert (got.status_code, got.headers["etag"]) == (304, tag)

    at_once(server, lambda client, number: write(client) if number == 0 else read(client), 4)
    last = server.http.get(url)
    assert last.json()["status"] == "0" and bodies.setdefault(last.headers["etag"], last.content) == last.content
    assert len(bodies) <= 5


def test_row_write_is_in_the_feed_at_the_offset_of_its_causality_token(server: Live, table: str) -> None:
    sub = server.subscribe(table, include={"before": True, "after": True})
    url = f"/api/v1/t/main/{table}/7"
    answers = [
        server.http.put(url, json={"status": "a"}),
        server.http.put(url, json={"status": "b", "total": 1.5}),
        server.http.patch(url, json={"total": None}),
        server.http.put(url, json={"status": "x"}, headers={"if-match": '"old"'}),
        server.http.delete(url),
    ]
    assert [answer.status_code for answer in answers] == [201, 200, 200, 412, 204]
    changes = server.changes(sub, wait_ms=5000)
    assert [change["op"] for change in changes] == ["insert", "update", "update", "delete"]
    assert changes[1]["after"] == {"id": 7, "status": "b", "total": 1.5}
    del answers[3]
    for change, answer in zip(changes, answers, strict=True):
        raw = answer.headers["x-headwater-causality"]
        assert _token(raw)["deps"] == [{"table": f"main.{table}", "v": change["offset"]}]


def _token(header: str) -> Any:
    import base64

    return json.loads(base64.urlsafe_b64decode(header + "=" * (-len(header) % 4)))


def test_row_tag_is_valid_after_a_restart_until_the_row_changes(start: Callable[..., Live]) -> None:
    live = start()
    live.sql("CREATE TABLE t(id INTEGER PRIMARY KEY, v)")
    url = "/api/v1/t/main/t/1"
    tag = live.http.put(url, json={"v": 1}).headers["etag"]
    live.restart()
    assert live.http.get(url, headers={"if-none-match": tag}).status_code == 304
    live.sql("UPDATE t SET v = 2")
    assert live.http.get(url, headers={"if-none-match": tag}).status_code == 200
    live.sql("UPDATE t SET v = 1")
    assert live.http.get(url, headers={"if-none-match": tag}).status_code == 304, "the tag is of the content"
    live.sql("ALTER TABLE t ADD COLUMN w")
    assert live.http.get(url, headers={"if-none-match": tag}).status_code == 200
    assert live.http.patch(url, json={"w": 1}, headers={"if-match": tag}).status_code == 412


def test_random_requests_are_answered_and_refused_ones_change_nothing(server: Live, table: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    url = f"/api/v1/t/main/{table}"
    server.http.put(f"{url}/1", json={"status": "a", "total": 1.0})
    tags = ['"x"', "*", 'W/"x"', "x", "", '"', "*,*"]
    values = [None, True, 0, 1, -1, 1.5, 2**63, 2**70, "", "1", "é", [], {}, {"t": "i64", "v": 1}, {"t": "?"}]
    for _ in range(300):
        method = dice.choice(["GET", "HEAD", "PUT", "PATCH", "DELETE"])
        path = f"{url}/{dice.choice(['1', '2', 'x', '1,2', '~i64:1', '~', '%2C', '%00', '%ff', '~null', '1%2F2'])}"
        headers = {dice.choice(["if-match", "if-none-match"]): dice.choice(tags) for _ in range(dice.randrange(3))}
        names = ["id", "status", "total", "nope", "", "rowid"]
        body = {dice.choice(names): dice.choice(values) for _ in range(dice.randrange(4))}
        sent = dice.choice([json.dumps(body), json.dumps(body)[:-1], json.dumps(dice.choice(values))]).encode()
        kind = dice.choice(["application/json"] * 4 + ["application/vnd.headwater.objects+json", "text/plain"])
        before = server.sql(f"SELECT * FROM {table} ORDER BY id")
        content = sent if method in ("PUT", "PATCH") or dice.random() < 0.1 else None
        response = server.http.request(method, path, content=content, headers=headers | {"content-type": kind})
        shown = (method, path, headers, sent, response.status_code, response.text)
        assert response.status_code in (200, 201, 204, 304, 400, 404, 409, 412, 415), shown
        if response.status_code >= 400:
            assert server.sql(f"SELECT * FROM {table} ORDER BY id") == before, shown
            if method != "HEAD":
                assert response.headers["content-type"] == "application/problem+json"
                assert response.json()["status"] == response.status_code


# --- the page --------------------------------------------------------------------------------------------


def examples() -> Iterator[tuple[str, str]]:
    """Yield each request of the rows section, and the answer shown after it."""
    section = page("docs/http-api.md").split("\n## Rows\n")[1].split("\n## ")[0]
    shown = [body for _, body in blocks(section, "http")]
    assert len(shown) % 2 == 0 and shown
    yield from zip(shown[::2], shown[1::2], strict=True)


def split(text: str) -> tuple[str, dict[str, str], str]:
    head, _, body = text.rstrip("\n").partition("\n\n")
    first, *lines = head.splitlines()
    return first, dict(line.split(": ", 1) for line in lines), body


def test_examples_of_the_rows_page_are_answered_as_shown(start: Callable[..., Live]) -> None:
    live = start()
    live.sql("CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT NOT NULL, credit DECIMAL_TEXT)")
    tag = ""
    for asked, expected in examples():
        (line, headers, body), (status, answered, content) = split(asked), split(expected)
        method, path = line.split()
        sent = {name: value.replace('"row:…"', tag) for name, value in headers.items()}
        response = live.http.request(method, path, headers=sent, content=body.encode() or None)
        assert f"{response.status_code} {response.reason_phrase}" == status, asked
        for name, value in answered.items():
            assert re.fullmatch(re.escape(value).replace("…", ".+"), response.headers[name]), (asked, name)
        assert (json.loads(content) if content else None) == (response.json() if response.content else None), asked
        tag = response.headers.get("etag", tag)
