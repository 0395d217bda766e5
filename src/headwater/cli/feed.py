"""A feed of server-sent events that resumes after the last event id when the connection breaks.

Events have an id in every format, so that a reader can resume after any of them; lines of NDJSON have none.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any

from headwater.cli.connection_failure import no_answer, reason, transport_error, unreachable
from headwater.cli.failure import FAILED, UNREACHABLE, Failure
from headwater.cli.filters import FeedTarget
from headwater.client.http_connections import Connections, Response
from headwater.client.protocol import EVENT_STREAM, get_request, parse_url
from headwater.client.sse import EventParser, Frame
from headwater.errors import HeadwaterError

SILENCE_SECONDS = 45.0  # a live server pings every 15
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0
COME_BACK = (429, 503)  # the server asks to retry
STAY = "--since earliest begins with the oldest change there is, --since snapshot with the rows as they are now."


class ConnectionBroken(Exception):
    """The connection broke, or the server is unavailable: retried, unless it was the first connection."""

    def __init__(self, reason: str, failure: Failure) -> None:
        super().__init__(reason)
        self.failure = failure


class Feed:
    """One stream of changes. `last_id` is the id of the newest frame returned: a new connection resumes after it."""

    def __init__(
        self,
        url: str,
        target: FeedTarget,
        query: Mapping[str, Any],
        *,
        last_id: str = "",
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._url, self._target, self._query = url, target, query
        self._connections = Connections(parse_url(url), token, SILENCE_SECONDS, tls)
        self.last_id, self._notice = last_id, notice
        self._response: Response | None = None

    def __str__(self) -> str:
        return f"{self._target}{self._after}"

    @property
    def _after(self) -> str:
        """Return " after offset N" for messages; "" while there is no offset, as in a snapshot."""
        return f" after offset {self.last_id}" if self.last_id.isdigit() else ""

    def follow(self, *, sleep: Callable[[float], None] = time.sleep) -> Generator[list[Frame]]:
        """Yield frames for ever, in batches as they arrive, and an empty batch for every new connection.

        Raises Failure if the first connection fails, or the server refuses the request; other failures are retried.
        """
        wait, connections, lost = FIRST_WAIT, 0, False
        while True:
            try:
                with closing(self.connect()) as batches:
                    if lost:
                        self._notice(f"connected again{self._after}")
                    connections, lost = connections + 1, False
                    yield []
                    for frames in batches:
                        wait = FIRST_WAIT if frames else wait
                        yield frames
                why = "the server ended the stream"
            except ConnectionBroken as broken:
                if not connections:
                    raise broken.failure from None
                why = str(broken)
            if not lost:
                self._notice(f"connection lost: {why}; trying again until the server is back")
            lost = True
            sleep(wait)
            wait = min(wait * 2, LONGEST_WAIT)

    def connect(self) -> Generator[list[Frame]]:
        """Open a connection; return a generator of batches of frames. Both raise ConnectionBroken or Failure."""
        batches = self._batches()
        next(batches)
        return batches

    def hang_up(self) -> None:
        """End the connection, from any thread; its reader gets ConnectionBroken."""
        if self._response is not None:
            self._response.hang_up()

    def _batches(self) -> Generator[list[Frame]]:
        """Yield an empty batch when the connection is open, then the frames received."""
        names = [self._target.db] if self._target.table is None else self._target
        request = get_request(["changes", *map(str, names)], self._query, EVENT_STREAM, self.last_id)
        parser, failure = EventParser(), unreachable
        try:
            with self._connections.respond(request) as self._response:
                self._check(self._response)
                failure = no_answer
                yield []
                for piece in self._response.pieces():
                    frames = [frame for frame in parser.take(piece) if frame.word]
                    if frames:
                        self.last_id = frames[-1].id
                    yield frames
        except HeadwaterError as error:
            cause = transport_error(error)
            raise ConnectionBroken(reason(cause), failure(self._url, cause)) from None

    def _check(self, response: Response) -> None:
        if response.status != 200:
            failure = _refusal(response.read())
            raise ConnectionBroken(failure.message, failure) if response.status in COME_BACK else failure
        if response.headers.get("content-type", "") != EVENT_STREAM:
            raise Failure(f"{self._url} is not a Headwater server", exit_code=UNREACHABLE)


def lost(body: dict[str, Any]) -> Failure:
    """Return the failure that the control event `resnapshot` reports."""
    retained = f"offsets {body['earliest_offset']} to {body['latest_offset']} are retained"
    return Failure(f"changes that were still to come are gone ({body['reason']}); {retained}", hint=STAY)


def ended(body: dict[str, Any]) -> Failure:
    """Return the failure that the control event `failed` reports."""
    hint = str((body.get("details") or {}).get("hint", ""))
    return Failure(f"{body.get('message', 'the server ended the stream')} ({body.get('code', 'internal')})", hint=hint)


def _refusal(body: bytes) -> Failure:
    try:
        found = json.loads(body)
        message, code = found["title"], found["code"]
    except (ValueError, TypeError, KeyError):
        return Failure("the server refused in words that are not Headwater's", exit_code=FAILED)
    if code == "resnapshot_required":
        retained = f"offsets {found['earliest_offset']} to {found['latest_offset']} are retained"
        return Failure(f"{message}; {retained} ({code})", hint=STAY)
    return Failure(f"{message} ({code})", hint=str(found.get("hint", "")))
