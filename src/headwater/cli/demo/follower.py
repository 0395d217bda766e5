"""The reader of the demo: a thread that reads a feed and notes when each change arrived."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

from headwater.cli.failure import Failure
from headwater.cli.feed import ConnectionBroken, Feed
from headwater.cli.filters import FeedTarget
from headwater.cli.output.changes import OPS
from headwater.client.sse import Frame
from headwater.model.formats import PLAIN

PATIENCE_SECONDS = 10.0
SHOWN = {"format": PLAIN, "include": "before,after"}


class ReceivedChange(NamedTuple):
    """A change as received, and its latency."""

    found: dict[str, Any]
    late_ms: float  # commit times are whole milliseconds: up to one too much

    @property
    def offset(self) -> int:
        """Return the offset of the change in the log."""
        return int(self.found["offset"])


class Follower:
    """A connected feed, read by a thread: all changes from now on, or those after the offset `last_id`."""

    def __init__(self, url: str, target: FeedTarget, *, last_id: str = "", **query: str) -> None:
        self._feed = Feed(url, target, SHOWN | query, last_id=last_id)
        try:
            self._batches = self._feed.connect()
        except ConnectionBroken as broken:
            raise broken.failure from None
        self._arrived: list[ReceivedChange] = []
        self._taken = 0
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(ConnectionBroken):  # hung up, or the server was killed
            for frames in self._batches:
                self._note([frame for frame in frames if frame.word in OPS], time.time() * 1000)

    def _note(self, frames: list[Frame], now_ms: float) -> None:
        found = [json.loads(frame.data) for frame in frames]
        with self._news:
            self._arrived += [ReceivedChange(each, max(now_ms - each["commit_ts_ms"], 0.0)) for each in found]
            self._news.notify_all()

    def take(self, upto: int = 0) -> list[ReceivedChange]:
        """Return the changes since the last call, after waiting for that at offset `upto`; Failure after 10 s."""
        with self._news:
            if not self._news.wait_for(lambda: upto <= self._newest(), PATIENCE_SECONDS):
                raise Failure(f"offset {upto} did not arrive", hint="Please report it: it is a defect of Headwater.")
            new = self._arrived[self._taken :]
            self._taken = len(self._arrived)
            return new

    def _newest(self) -> int:
        return self._arrived[-1].offset if self._arrived else 0

    def close(self) -> None:
        """Close the connection, and wait for the thread."""
        self._feed.hang_up()
        self._thread.join()
