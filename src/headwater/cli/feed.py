"""A feed over HTTP: the frames of server-sent events as they arrive, and on from the last one when the line breaks.

Events carry an id in every format, so that a reader can go on after any of them; lines of NDJSON do not.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from headwater.cli.commands.config import load_config
from headwater.cli.connection_failure import no_answer, reason, unreachable
from headwater.cli.failure import FAILED, UNREACHABLE, Failure
from headwater.cli.filters import Place
from headwater.cli.remote import connection_to

SILENCE_SECONDS = 45.0  # a live server gives a sign of life every 15
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0
PIECE = 1 << 16
COME_BACK = (429, 503)  # the server says: not now
STAY = "--since earliest begins with the oldest change there is, --since snapshot with the rows as they are now."


class Frame(NamedTuple):
    """One event: an op, or a word of control, with its JSON."""

    id: str
    word: str
    data: bytes


class Splitter:
    """From pieces of a text/event-stream to frames."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, piece: bytes) -> list[Frame]:
        """The frames that `piece` completes."""
        *blocks, self._rest = (self._rest + piece).split(b"\n\n")
        return [frame for frame in map(_frame, blocks) if frame is not None]


def _frame(block: bytes) -> Frame | None:
    fields: dict[str, bytes] = {}
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        fields[name.decode("latin-1")] = value.removeprefix(b" ")
    if "data" not in fields:
        return None  # a sign of life
    return Frame(fields.get("id", b"").decode(), fields.get("event", b"message").decode(), fields["data"])


class Broken(Exception):
    """The line broke, or the server cannot answer just now: worth another try, unless it is the first."""

    def __init__(self, reason: str, failure: Failure) -> None:
        super().__init__(reason)
        self.failure = failure


class Feed:
    """One stream of changes. `last_id` is that of the newest frame handed out: the place to go on from."""

    def __init__(
        self,
        url: str,
        place: Place,
        query: dict[str, str],
        *,
        last_id: str = "",
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        names = (place.db,) if place.table is None else place
        path = "/".join(quote(name or "", safe="", errors="surrogateescape") for name in names)
        self._tls = tls
        self._url, self._path = url, f"/api/v1/changes/{path}?{urlencode(query)}"
        self._headers = {"accept": "text/event-stream"} | (
            {} if token is None else {"authorization": f"Bearer {token}"}
        )
        self._place, self.last_id, self._notice = place, last_id, notice
        self._socket: socket.socket | None = None

    def __str__(self) -> str:
        return f"{self._place}{self._after}"

    @property
    def _after(self) -> str:
        """Where it is; nothing while it has no offset, as in a snapshot."""
        return f" after offset {self.last_id}" if self.last_id.isdigit() else ""

    def follow(self, *, sleep: Callable[[float], None] = time.sleep) -> Generator[list[Frame]]:
        """Frames for ever, in batches as they arrive, an empty one for every connection.

        Only a first connection that fails, or a refusal, ends it.
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
            except Broken as broken:
                if not connections:
                    raise broken.failure from None
                why = str(broken)
            if not lost:
                self._notice(f"connection lost: {why}; trying again until the server is back")
            lost = True
            sleep(wait)
            wait = min(wait * 2, LONGEST_WAIT)

    def connect(self) -> Generator[list[Frame]]:
        """Open one connection; the batches of frames that come over it, until it ends or is Broken."""
        connection = connection_to(self._url, self._tls, SILENCE_SECONDS)
        headers = self._headers | ({"last-event-id": self.last_id} if self.last_id else {})
        try:
            connection.connect()
            self._socket = connection.sock
            connection.request("GET", self._path, headers=headers)
            response = connection.getresponse()
            self._check(response)
            return self._batches(connection, response)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Broken(reason(error), unreachable(self._url, error)) from None
        except BaseException:
            connection.close()
            raise

    def hang_up(self) -> None:
        """From another thread: end the connection. Whoever reads it sees it Broken."""
        if self._socket is not None:
            with suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status != 200:
            failure = _refusal(response.read())
            raise Broken(failure.message, failure) if response.status in COME_BACK else failure
        if response.getheader("content-type", "") != "text/event-stream":
            raise Failure(f"{self._url} is not a Headwater server", exit_code=UNREACHABLE)

    def _batches(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> Generator[list[Frame]]:
        splitter = Splitter()
        with closing(connection), response:
            while piece := self._piece(response):
                frames = splitter.take(piece)
                if frames:
                    self.last_id = frames[-1].id
                yield frames

    def _piece(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read1(PIECE)
        except (OSError, http.client.HTTPException) as error:
            raise Broken(reason(error), no_answer(self._url, error)) from None


def credential(args: argparse.Namespace) -> str | None:
    """What HEADWATER_TOKEN or --token-file holds."""
    token = load_config(args).serve.token
    return None if token is None else token.encode().decode()


def lost(body: dict[str, Any]) -> Failure:
    """What a `resnapshot` says, and the way on."""
    retained = f"offsets {body['earliest_offset']} to {body['latest_offset']} are retained"
    return Failure(f"changes that were still to come are gone ({body['reason']}); {retained}", hint=STAY)


def ended(body: dict[str, Any]) -> Failure:
    """What an `error` says."""
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
