"""Readers on every transport: they read in pieces of random size, lag, disconnect, return, pause and ack at random."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, urlencode

from tests.guarantees.feed_journal import BEGIN, LOST, REACHED, RESTART, ROWS
from tests.guarantees.feed_oracle import DB
from tests.guarantees.feed_reader import GIVE_UP, Ended, Reader
from tests.guarantees.raw_streams import HttpStream, WebSocket


class PollReader(Reader):
    """Polls repeatedly, with and without a wait, with and without an explicit offset."""

    def session(self) -> None:
        self.whims()
        self.know_cursor()
        if self.chance(self.sleepy):
            self.nap(3)
        params: dict[str, Any] = {"sub_id": self.sub, "limit": self.random.choice((1, 3, 20, 200))}
        if not self.is_wild:
            params["limit"] = 1000
        if self.spec.transport == "long_poll":
            params["wait_ms"] = self.random.choice((50, 500))
        if self.chance(0.05):
            self.pause()
        if self.rows_due:
            self._ask_rows(params)
        else:
            self._ask_changes(params)
        self.nap(self.random.random() * 0.1 if self.spec.transport == "poll" or self.chance(0.1) else 0)

    def _ask_rows(self, params: dict[str, Any]) -> None:
        if self.place:
            params["cursor"] = self.place
        answer = self.ask("cdc.poll", **params)
        state = answer.get("snapshot")
        self.note(ROWS)
        if answer["resnapshot_required"]:
            return self._told_lost(answer)
        if state is None:
            if answer["backpressure"]["paused"]:
                return None
            self.defects.append(f"rows were due, and there came {json.dumps(answer)[:300]}")
            raise Ended
        if state.get("restarted"):
            self.note(RESTART)
        for body in answer["events"]:
            self.hear_change(body)
        self.place = state["cursor"]
        if state["done"]:
            self.rows_over(answer["next_offset"])
            self._behind = int(answer["latest_offset"])
        elif self.chance(0.3):
            self.ask("cdc.ack", sub_id=self.sub, cursor=self.place)
        return None

    def _ask_changes(self, params: dict[str, Any]) -> None:
        assert self.acked is not None
        begin = self.acked
        if self.last is not None and not self.chance(0.3):
            params["from_offset"] = self.last
            begin = max(self.last, self.acked)
        elif self.last is not None:
            self.send_ack(min(self.last, max(self.acked, self.last)))  # else the same page comes for ever
            begin = self.acked
        answer = self.ask("cdc.poll", **params)
        self.note(BEGIN, begin)
        if answer["resnapshot_required"]:
            return self._told_lost(answer)
        for body in answer["events"]:
            self.hear_change(body)
        self._reached(answer)
        return None

    def _reached(self, answer: dict[str, Any]) -> None:
        offset = int(answer["next_offset"])
        if self.base is None and offset >= getattr(self, "_behind", 0):
            self.caught_up(offset)
        self.note(REACHED, offset)
        self.last = max(self.last or 0, offset)
        self.is_done = self.goal >= 0 and offset >= self.goal

    def _told_lost(self, answer: dict[str, Any]) -> None:
        reason = answer["resnapshot_reason"]
        self.note(LOST, body=reason)
        self.lost(reason, answer)


class StreamReader(Reader):
    """Reads a stream in pieces of random size and disconnects at random positions."""

    wire: HttpStream | WebSocket

    def session(self) -> None:
        if self.sub:
            self.whims()
        self.wire = self.connect()
        left = self.random.choice((500, 3000, 40_000, 400_000)) if self.chance(0.8) else None
        slow = self.chance(0.2)
        if self.chance(self.sleepy):
            self.nap(3)
        try:
            while not self.is_done and self.goal != GIVE_UP:
                size = self.random.choice((1, 7, 200, 4096)) if self.chance(0.3) else 65_536
                if left is not None and self.is_wild:
                    size = min(size, max(left, 1))
                    left -= size if size < 4096 else 400
                heard = self.wire.read(size)
                if heard is None:
                    raise Ended
                for said in heard:
                    self.hear(said)
                if left is not None and left <= 0 and self.is_wild:
                    raise Ended  # in the midst of a frame, more often than not
                self.while_open(slow)
        finally:
            self.wire.close()

    def while_open(self, slow: bool) -> None:
        if slow and self.chance(0.2):
            self.nap(self.random.choice((0.05, 0.3)))
        if self.sub and self.chance(0.01):
            self.pause()
            self.nap(0.2)
            self.ask("cdc.resume", sub_id=self.sub)
            self.is_paused = False
        if self.sub and self.base is not None and self.last is not None and self.chance(0.05):
            self.send_ack(max(self.base, self.last - self.random.randrange(100)))

    def where(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the headers and parameters of the position to resume from; record it in the journal."""
        headers, query = {}, {}
        if self.rows_due:
            self.note(ROWS)
            if self.place:
                headers["Last-Event-ID"] = f"s:{self.place}"
        elif self.last is None:
            assert self.acked is not None
            self.note(BEGIN, self.acked)
        elif self.acked is not None and self.goes_back_to(self.acked):
            self.last = self.acked  # an ack of what was seen before would make the stream skip it
            self.note(BEGIN, self.last)
        else:
            self.note(BEGIN, max(self.last, self.acked or 0))
            if self.random.random() < 0.5:
                headers["Last-Event-ID"] = str(self.last)
            else:
                query["from_offset"] = str(self.last)
        return headers, query

    def goes_back_to(self, acked: int) -> bool:
        """Return whether to reconnect without a position, so that the server resumes after the newest ack."""
        return self.has_shown and acked >= (self.base or 0) and self.chance(0.15)

    def connect(self) -> HttpStream | WebSocket:
        headers, query = self.where()
        path = f"/api/v1/cdc/sse/{self.sub}" + (f"?{urlencode(query)}" if query else "")
        return HttpStream(self.server.url, path, headers, sse=True)


class WebSocketReader(StreamReader):
    """Sends acks and pauses as frames."""

    def connect(self) -> WebSocket:
        headers, query = self.where()
        path = f"/api/v1/cdc/ws/{self.sub}" + (f"?{urlencode(query)}" if query else "")
        return WebSocket(self.server.url, path, headers)

    def whims(self) -> None:
        """Make no requests between sessions: a frame that is still on its way could overtake a seek."""

    def while_open(self, slow: bool) -> None:
        assert isinstance(self.wire, WebSocket)
        if slow and self.chance(0.2):
            self.nap(self.random.choice((0.05, 0.3)))
        if self.chance(0.02):
            self.is_paused = True
            self.wire.say({"pause": True})
            self.nap(0.2)
            self.wire.say({"pause": False})  # if it gets there: a cut may take it along
        if self.place and self.rows_due and self.chance(0.2):
            self.wire.say({"ack": f"s:{self.place}"})
        if self.base is not None and self.last is not None and self.chance(0.1):
            self.acked = None
            self.wire.say({"ack": max(self.base, self.last - self.random.randrange(100))})

    def know_cursor(self) -> None:
        """Ask only if nothing was received: an ack may still be on its way, so the reader gives its position."""
        if self.last is None:
            super().know_cursor()


class ChangesReader(StreamReader):
    """A stream without a subscription, NDJSON or SSE: the server stores no position for it."""

    def prepare(self) -> None:
        if self.last is None and not self.rows_due:  # where it begins, so that the journal can tell
            found = self.ask("stats.snapshot")["cdc"]
            latest, earliest = int(found["latest_offset"]), int(found["earliest_offset"])
            self.last = self.base = latest if self.spec.start == "latest" else max(earliest - 1, 0)
        self.acked = None

    def connect(self) -> HttpStream:
        query = self._query()
        headers: dict[str, str] = {}
        if self.rows_due:  # nobody keeps its place: it begins anew
            self.note(RESTART)
            self.note(ROWS)
            query["start"] = "snapshot"
        else:
            self.note(BEGIN, self.last or 0)
            if self.random.random() < 0.5:
                query["from_offset"] = str(self.last)
            else:
                headers["Last-Event-ID"] = str(self.last)
        sse = self.spec.transport == "changes_sse"
        headers |= {} if sse else {"Accept": "application/x-ndjson"}
        table = f"/{self.spec.tables[0]}" if self.spec.tables else ""
        path = f"/api/v1/changes/{DB}{table}?{urlencode(query, quote_via=quote)}"
        return HttpStream(self.server.url, path, headers, sse=sse)

    def _query(self) -> dict[str, str]:
        spec = self.spec
        found = {name: json.dumps(_plain(value)) for name, value in spec.params.items() if name != "where"}
        found |= {"where": spec.params["where"]} if "where" in spec.params else {}
        include = [word for word, wanted in (("before", spec.before), ("after", spec.after)) if wanted]
        found |= {"include": ",".join(include), "format": spec.format}
        found |= {name: ",".join(words) for name, words in (("columns", spec.columns), ("ops", spec.ops)) if words}
        return found | ({"shard": f"{spec.shard[0]}/{spec.shard[1]}"} if spec.shard else {})


def _plain(value: Any) -> Any:
    """Return Lits as plain JSON: a query string accepts both."""
    match value:
        case {"t": _, "v": found}:
            return found
        case dict():
            return {name: _plain(each) for name, each in value.items()}
        case list():
            return [_plain(each) for each in value]
    return value


KINDS: dict[str, type[Reader]] = {
    "poll": PollReader,
    "long_poll": PollReader,
    "sse": StreamReader,
    "websocket": WebSocketReader,
    "changes_sse": ChangesReader,
    "ndjson": ChangesReader,
}
