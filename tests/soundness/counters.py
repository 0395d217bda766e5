"""Concurrent reads and writes of counters that only grow, so that an answer shows which writes it includes.

A request that began after a write was acknowledged must return at least that write, with 200 or with 304.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import httpx
from tests.soundness.differential_checker import Unsound
from tests.suite.deadlines import PATIENCE

SIZE = 4
TABLE = "CREATE TABLE counter (id INTEGER PRIMARY KEY, v INTEGER NOT NULL, note TEXT)"
ROWS = f"INSERT INTO counter VALUES {', '.join(f'({id}, 0, NULL)' for id in range(SIZE))}"
ONE = "SELECT v FROM counter WHERE id = ?"
SUM = "SELECT sum(v) AS v FROM counter"
MOST = "SELECT v FROM counter ORDER BY v DESC LIMIT 1"
PLAIN = {"accept": "application/vnd.headwater.plain+json"}


class Question:
    """A query over the counters, and the least value that its answer must have."""

    def __init__(self, path: str, least: Callable[[list[int]], int]) -> None:
        self.path, self.least = path, least
        self.bodies: dict[str, bytes] = {}  # by tag, of all who ask


def rpc(url: str, method: str, **params: Any) -> Any:
    """Return the result of an RPC; fail if there is none."""
    answer = httpx.post(
        f"{url}/api/v1/rpc", json={"id": 1, "method": method, "params": params}, timeout=PATIENCE
    ).json()
    assert answer["ok"], answer
    return answer["result"]


class Counters:
    """Writers and readers of one server; the readers use `read_at`, which may be a cache in front of it."""

    def __init__(self, url: Callable[[], str], database: Path, read_at: Callable[[], str] | None = None) -> None:
        self.url, self.read_at, self._database = url, read_at or url, database
        self.done = [0] * SIZE  # what was acknowledged, by counter
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self._over = threading.Event()
        self._turn = threading.Condition()
        for sql in (TABLE, ROWS):
            rpc(url(), "sql.exec", sql=sql)
        ids = {sql: rpc(url(), "query.prepare", sql=sql)["query_id"] for sql in (ONE, SUM, MOST)}
        self.questions = [Question(f"/api/v1/q/{ids[SUM]}", sum), Question(f"/api/v1/q/{ids[MOST]}", max)]
        for place in range(SIZE):
            self.questions.append(Question(f"/api/v1/q/{ids[ONE]}?args=[{place}]", lambda done, at=place: done[at]))

    # --- who takes part --------------------------------------------------------------------------------------

    def run(self, writes: int, readers: int = 3, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Run writers (`writes` each) and readers concurrently; raise the first failure that one of them found."""
        started = [
            threading.Thread(target=self._guarded, args=(self._write, place, writes)) for place in range(SIZE // 2)
        ]
        looking = [threading.Thread(target=self._guarded, args=(self._look, place)) for place in range(readers)]
        for thread in [*started, *looking]:
            thread.start()
        try:
            meanwhile()
        finally:
            for thread in started:
                thread.join()
            self._end()
            for thread in looking:
                thread.join()
        if self.failures:
            raise self.failures[0]

    def until_seen(self, answers: int) -> None:
        """Wait for `answers` more answers, or for the end."""
        with self._turn:
            wanted = self.counts.total() + answers
            self._turn.wait_for(lambda: self.counts.total() >= wanted or self._over.is_set())

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:  # raised again by whoever started us
            self.failures.append(error)
            self._end()

    def _end(self) -> None:
        with self._turn:
            self._over.set()
            self._turn.notify_all()

    def _write(self, place: int, writes: int) -> None:
        """Write the counters `place` and `place + SIZE/2`: even places through the server, odd ones directly to the
        file.
        """
        run = self._through_server if place % 2 == 0 else self._past_server
        with run() as execute:
            for number in range(1, writes + 1):
                for id in (place, place + SIZE // 2):
                    if number % 3:  # what no question is about
                        execute(f"UPDATE counter SET note = '{number}' WHERE id = {id}")
                    else:
                        execute(f"UPDATE counter SET v = {number} WHERE id = {id}")
                        self.done[id] = number
                if self._over.is_set():
                    return

    @contextlib.contextmanager
    def _through_server(self) -> Any:
        def execute(sql: str) -> None:
            while not self._over.is_set():
                with contextlib.suppress(httpx.HTTPError):  # it was killed: the same again does no harm
                    asked = {"id": 1, "method": "sql.exec", "params": {"sql": sql}}
                    assert http.post(f"{self.url()}/api/v1/rpc", json=asked).json()["ok"]
                    return

        with httpx.Client(timeout=PATIENCE) as http:
            yield execute

    @contextlib.contextmanager
    def _past_server(self) -> Any:
        database = apsw.Connection(str(self._database))
        database.set_busy_timeout(30_000)
        try:
            yield database.execute
        finally:
            database.close()

    def _look(self, number: int) -> None:
        dice, held = random.Random(number), dict[str, tuple[str, int]]()
        with httpx.Client(timeout=PATIENCE, headers={**PLAIN, "accept-encoding": "gzip" if number % 2 else ""}) as http:
            while not self._over.is_set():
                with contextlib.suppress(httpx.TransportError):
                    self.ask(http, dice.choice(self.questions), held)

    # --- judging ---------------------------------------------------------------------------------------------

    def ask(self, http: httpx.Client, question: Question, held: dict[str, tuple[str, int]]) -> int:
        """Send one request, with the held tag if there is one; return the value that the answer shows."""
        least, known = question.least(self.done), held.get(question.path)
        headers = {"if-none-match": known[0]} if known else {}
        answer = http.get(self.read_at() + question.path, headers=headers)
        with self._turn:
            self.counts[str(answer.status_code)] += 1
            self._turn.notify_all()
        if answer.status_code == 304:
            assert known is not None
            tag, value = known
        else:
            assert answer.status_code == 200, answer.text
            tag, value = answer.headers["etag"], answer.json()["data"]["rows"][0][0]
            first = question.bodies.setdefault(tag.removeprefix("W/"), answer.content)
            if first != answer.content:
                raise Unsound(f"two answers have the tag {tag}: {first!r} {answer.content!r}")
        if value < least:
            raise Unsound(f"{answer.status_code} {tag} shows {value} where {least} was acknowledged before")
        held[question.path] = tag, value
        return value
