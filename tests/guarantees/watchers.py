"""Readers that are told when the answer of a query is stale, and request it at times; and the validators of their
journals.

No invalidation means that the answer is unchanged: at every mark "you know everything up to here" the answer is that of
the last invalidation. A tag names one answer, and a 304 confirms the held one. A watcher that was told of a change can
read it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import httpx
from tests.guarantees.feed_journal import BEGIN, CHANGE, Entry, Step
from tests.guarantees.feed_oracle import Expected, Keyed, Truth, dumps
from tests.guarantees.feed_reader import Ended, Reader
from tests.guarantees.feed_readers import PollReader, StreamReader, WebSocketReader
from tests.guarantees.feed_validators import MARKS, FeedValidator
from tests.guarantees.server_process import Gone, Refused
from tests.suite.deadlines import PATIENCE

ANSWER, LOOKED, SAME = "answer", "looked", "same"  # rows at an offset · a tag and rows · a 304 for a tag and rows
LATER = (409, 429, 503, 507)  # statuses: come again
ANEW = ("invalid_request", "resnapshot_required")  # a tag from before


class Watching(Reader):
    """A mixin placed before a transport class: the reader holds an answer instead of rows."""

    tag, rows, query = "", list[Any](), ""

    def prepare(self) -> None:
        if not self.sub:
            self._begin()
        elif self.chance(0.3):
            self._look()
        super().prepare()

    def _begin(self) -> None:
        """Prepare the query, request its answer and subscribe from the tag of the answer."""
        self.query = self.ask("query.prepare", sql=self.spec.query)["query_id"]
        self._look()
        if not self.tag:
            raise Ended
        try:
            found = self.ask("cdc.subscribe_query", query_id=self.query, start={"etag": self.tag}, name=self.name)
        except Refused as error:
            self.tag = ""
            if error.code in ANEW:
                raise Ended from error
            raise
        self.sub, self.acked = found["sub_id"], found["offset"]
        self.last = self.base = int(found["offset"])
        if found["created"]:  # else an answer was lost, and the first one holds
            self.note(ANSWER, self.last, self.rows)

    def _look(self) -> None:
        """Request the answer; record it, or that it is unchanged."""
        floor, headers = self.last or 0, {"If-None-Match": self.tag} if self.tag else {}
        try:
            with httpx.Client(timeout=PATIENCE, base_url=self.server.url) as http:
                found = http.get(f"/api/v1/q/{self.query}", headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Gone(str(error)) from error
        if found.status_code == 304:
            self.note(SAME, floor, (self.tag, self.rows))
        elif found.status_code == 200:
            self.tag, self.rows = found.headers.get("etag", ""), found.json()["data"]["rows"]
            self.note(LOOKED, floor, (self.tag, self.rows))
        elif found.status_code not in LATER:
            self.defects.append(f"the answer: {found.status_code} {found.text[:200]}")

    def lost(self, reason: str, body: dict[str, Any] | None = None) -> None:
        self.losses.append(reason)
        self.name, self.sub, self.tag = self.name + "+", "", ""
        raise Ended


class _Poll(Watching, PollReader):
    pass


class _Stream(Watching, StreamReader):
    pass


class _WebSocket(Watching, WebSocketReader):
    pass


WATCHERS: dict[str, type[Reader]] = {"poll": _Poll, "long_poll": _Poll, "sse": _Stream, "websocket": _WebSocket}


class Answers:
    """The answer of the query at any offset, as a number: the sum over its rows."""

    def __init__(self, expected: Expected) -> None:
        self.truth = expected.truth
        self._begins: list[int] = []  # of the transactions that make it another one
        self._sums: list[int] = [0]
        rows: dict[Keyed, int] = {}
        offsets, keys = expected.every_touch()
        for offset, key in zip(offsets, keys, strict=True):
            image = expected.image(key, offset)
            rows[key], was = (0 if image is None else _number(list(image.values()))), rows.get(key, 0)
            self._moved(self._begin(offset), rows[key] - was)

    def _begin(self, offset: int) -> int:
        return begin_of(self.truth, offset)

    def _moved(self, begin: int, by: int) -> None:
        if not self._begins or self._begins[-1] != begin:
            self._begins.append(begin)
            self._sums.append(self._sums[-1])
        self._sums[-1] += by

    def at(self, offset: int) -> int:
        """Return the sum after the transaction of `offset`."""
        return self._sums[bisect_right(self._begins, offset)]

    def before(self, offset: int) -> int:
        """Return the sum before the transaction of `offset`."""
        return self._sums[bisect_right(self._begins, self._begin(offset) - 1)]

    def places(self, sum: int) -> list[int]:
        """Return the first offsets of the transactions that made the sum `sum`."""
        return [begin for begin, each in zip(self._begins, self._sums[1:], strict=True) if each == sum]

    def since(self, offset: int) -> set[int]:
        """Return every value of the sum at `offset` and later."""
        return {*self._sums[bisect_right(self._begins, offset) :], self.at(offset)}


def begin_of(truth: Truth, offset: int) -> int:
    """Return the first offset of a transaction."""
    seen = truth.by_offset.get(offset)
    return offset if seen is None else seen.part.first - seen.part.start


def _number(row: list[Any]) -> int:
    return hash(dumps(row)) | 1  # no row is nothing


def number_of(rows: list[list[Any]]) -> int:
    """Return the sum of an answer."""
    return sum(map(_number, rows))


class FreshFeed(FeedValidator):
    """The rules of this module's docstring for one watcher."""

    def __init__(self, expected: Expected) -> None:
        super().__init__()
        self._answers, self._known = Answers(expected), 0
        self._held: dict[str, int] = {}  # by tag: the answer
        self._told: dict[str, int] = {}  # by tag: the offset of the invalidation that named it

    def step(self, step: Step, expected: Expected) -> None:
        entry, answers = step.entry, self._answers
        match entry.kind:
            case "begin":
                self._known = answers.at(entry.offset)
            case "change":
                if step.at is not None and entry.offset <= step.at:
                    self.fail(f"{entry.offset} follows {step.at}")
                self._known = answers.at(entry.offset)
                self._told[entry.body["etag"]] = entry.offset
            case "answer":
                if self._is_settled(entry.offset) and number_of(entry.body) != answers.at(entry.offset):
                    self.fail(f"the answer whose tag stands at {entry.offset} is another: {dumps(entry.body)[:300]}")
            case "looked" if entry.body[0]:
                tag, rows = entry.body
                if self._held.setdefault(tag, number_of(rows)) != number_of(rows):
                    self.fail(f"two answers have the tag {tag}: {dumps(rows)[:300]}")
                if self._is_settled(entry.offset) and number_of(rows) not in answers.since(entry.offset):
                    self.fail(f"an answer from before {entry.offset}, which it was told of: {dumps(rows)[:300]}")
            case "same":
                if number_of(entry.body[1]) not in answers.since(entry.offset):
                    self.fail(f"a 304 for what was no answer any more at {entry.offset}: {entry.body[0]}")
            case kind if kind in MARKS and step.at is not None:
                self._silent(entry, expected)

    def _silent(self, entry: Entry, expected: Expected) -> None:
        """Check that the answer at a mark is the last known one; a page may end inside a relevant transaction."""
        allowed = {self._answers.at(entry.offset)}
        if not expected.truth.ends_transaction(entry.offset):
            allowed.add(self._answers.before(entry.offset))
        if self._known not in allowed:
            self.fail(f"the answer at {entry.kind} {entry.offset} is another, and nobody said so")
            self._known = self._answers.at(entry.offset)  # one fault is told once

    def _is_settled(self, offset: int) -> bool:
        return begin_of(self._answers.truth, offset) not in self._answers.truth.unsettled

    def check_tags(self) -> None:
        """Check that the tag of each invalidation is that of the answer at that offset."""
        for tag in self._told.keys() & self._held.keys():
            offset = self._told[tag]
            if self._is_settled(offset) and self._held[tag] != self._answers.at(offset):
                real = self._answers.places(self._held[tag])  # older ones would make a 304 wrong, newer ones not
                self.fail(f"{tag} was said to be the answer at {offset}, and is another one's: of {real[-5:]}")


def validate_watcher(journal: list[Entry], expected: Expected) -> list[str]:
    """Return all violations of one watcher."""
    fresh = FreshFeed(expected)
    fresh.check(journal, expected)
    fresh.check_tags()
    told = sum(entry.kind == CHANGE for entry in journal)
    begun = any(entry.kind == BEGIN for entry in journal)
    return fresh.failures + ([] if begun else [f"it never was told where it stands ({told} invalidations)"])
