"""The JavaScript client in a browser, on a server that sends wrong patches and cuts streams: rows become right."""

import json
import random
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
import pytest
from tests.browser.chromium import Browser
from tests.browser.js_site import Site, SiteHandler

from headwater.queries.patch.patch import Answer, diff
from headwater.queries.patch.recent_results import Results

pytestmark = pytest.mark.slow
COLUMNS = ({"name": "id"}, {"name": "v"})
STEPS = 60


class Held:
    """The state of the faulty server: one query, its answers by version, and the listeners."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.results = Results(per_instance=100)
        self.version, self.cuts, self.closed = 0, 0, False
        self.answer = self._made([(1, "a"), (2, "b")])
        self.spoils = self.spoiled = 0  # patches to be sent wrong, and those that were
        self.results.keep("q", self.answer)

    def _made(self, rows: list[Any]) -> Answer:
        return Answer.of(f'"p.{self.version:x}"', COLUMNS, rows, key=(0,))

    def set(self, rows: list[Any], *, cut: bool, spoil: bool) -> None:
        """Write once; with `cut` every stream ends before it, with `spoil` the next patch is wrong."""
        with self.changed:
            self.version += 1
            self.cuts += cut
            self.spoils = int(spoil)
            self.answer = self._made(rows)
            self.results.keep("q", self.answer)
            self.changed.notify_all()

    def patch(self, tag: str) -> bytes | None:
        base = self.results.find("q", tag)
        if base is None:
            return None
        sent: bytes = msgspec.json.encode(diff(base, self.answer))
        if self.spoils:
            self.spoils, self.spoiled = 0, self.spoiled + 1
            return sent.replace(b'"result_hash":"sha256:', b'"result_hash":"sha256:0', 1)
        return sent


class Handler(SiteHandler):
    held: ClassVar[Held]

    def do_GET(self) -> None:
        if not self.path.startswith("/api/v1/q/q"):
            super().do_GET()
        elif "/events" in self.path:
            self._events()
        else:
            with self.held.changed:
                self._query()

    def _query(self) -> None:
        answer, tag = self.held.answer, self.headers.get("if-none-match", "")
        if tag == answer.tag:
            return self.answer(304, b"", {"etag": tag})
        patch = self.held.patch(tag) if self.headers.get("a-im") == "headwater-rows" else None
        if patch is not None:
            return self.answer(226, patch, {"etag": answer.tag, "im": "headwater-rows"})
        data = {"columns": COLUMNS, "rows": msgspec.Raw(answer.rows_text)}
        body = msgspec.json.encode({"etag": answer.tag, "data": data})
        return self.answer(200, body, {"etag": answer.tag, "content-type": "application/json"})

    def _events(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": here\n\n")
        held = self.held
        with held.changed:
            seen, cuts = held.version, held.cuts
            while True:
                while held.version == seen and not held.closed:
                    held.changed.wait()
                if held.closed or held.cuts > cuts:
                    return
                seen = held.version
                tag = held.answer.tag
                told = {"query_id": "q", "etag": tag, "new_etag": tag, "table": "main.t", "offset": seen}
                self.wfile.write(b"id: %d\nevent: invalidate\ndata: %s\n\n" % (seen, msgspec.json.encode(told)))


@pytest.fixture
def held(browser: Browser) -> Iterator[Held]:
    made = Handler.held = Held()
    site = Site(Handler)
    browser.visit(site.url)
    browser.until("window.headwater !== undefined")
    yield made
    browser.visit("about:blank")
    with made.changed:
        made.closed = True
        made.changed.notify_all()
    site.close()


def text(rows: list[Any]) -> str:
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":"))


def edited(rows: list[Any], rng: random.Random) -> list[Any]:
    """Return the rows after a few random edits: some removed, changed, added, and one moved."""
    kept = [(key, rng.choice(["a", "ä", "😀"]) if rng.random() < 0.2 else v) for key, v in rows if rng.random() < 0.85]
    new = [key for key in rng.sample(range(40), 3) if key not in dict(kept)]
    for key in new:
        kept.insert(rng.randrange(len(kept) + 1), (key, "new"))
    if len(kept) > 1:
        kept.insert(rng.randrange(len(kept)), kept.pop(rng.randrange(len(kept))))
    return kept


def test_live_query_recovers_the_right_rows_from_cut_and_spoiled_answers(
    browser: Browser, held: Held, fresh_seed: str
) -> None:
    rng = random.Random(fresh_seed)
    rows: list[Any] = [(1, "a"), (2, "b")]
    browser.run("live({url: location.origin, queryId: 'q'})")
    for step in range(STEPS):
        browser.until(f"JSON.stringify(query.answer?.rows) === {json.dumps(text(rows))}")
        rows = edited(rows, rng)
        held.set(rows, cut=step % 20 == 19, spoil=rng.random() < 0.2)
    browser.until(f"JSON.stringify(query.answer?.rows) === {json.dumps(text(rows))}")
    counts = browser.value("query.counts")
    assert counts["mismatches"] == held.spoiled, counts
    assert counts["patched"] > STEPS / 2, counts
    assert browser.value("errors") == []


def test_page_without_web_crypto_detects_a_spoiled_patch(browser: Browser, held: Held) -> None:
    browser.run("Object.defineProperty(window, 'crypto', {value: {}})")
    browser.run("live({url: location.origin, queryId: 'q'})")
    browser.until("query.answer !== null")
    held.set([(1, "a"), (2, "B")], cut=False, spoil=True)
    browser.until("query.counts.mismatches === 1 && query.answer.rows[1][1] === 'B'")
    held.set([(1, "a"), (2, "C")], cut=False, spoil=False)
    browser.until("query.counts.patched === 1 && query.answer.rows[1][1] === 'C'")
