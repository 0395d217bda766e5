"""A reader of a feed: a thread that makes random choices and records everything it receives in its journal.

It knows the protocol and not the truth. Its transport decides how it reads: see `feed_readers.py`.
"""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import httpx
from tests.guarantees.feed_journal import CAUGHT_UP, CHANGE, CHECKPOINT, LOADED, LOST, RESTART, ROW, ROWS_END, Entry
from tests.guarantees.feed_oracle import DB, Spec
from tests.guarantees.raw_streams import Said, Status
from tests.guarantees.server_process import Asking, Gone, Refused, ServerProcess
from tests.suite.deadlines import PATIENCE

from headwater.model.clock import parse_ts, ts_ms

LATER = {"unavailable", "busy", "limit_exceeded", "source_error", "storage_full"}  # come again in a moment
GIVE_UP = -2  # a goal
OPS = ("insert", "update", "delete", "schema_change", "truncate", "invalidate")


class Ended(Exception):
    """The session ended; another session follows."""


class Reader:
    """The parts that readers of all transports share."""

    def __init__(self, server: ServerProcess, spec: Spec, dice: random.Random, name: str) -> None:
        self.server, self.spec, self.random, self.name = server, spec, dice, name
        self.ask = Asking(server)
        self.journal: list[Entry] = []
        self.defects: list[str] = []
        self.sub = ""
        self.last: int | None = None  # the newest offset seen; None before the changes
        self.place: str | None = None  # in the snapshot
        self.rows_due = spec.start == "snapshot"
        self.acked: int | None = None  # as the server has it; None when that is not sure
        self.base: int | None = None  # never seek behind this
        self.has_shown = not self.rows_due  # that it has the rows: by an ack, or by an offset
        self.is_paused = False
        self.trusts_time = True  # a checkpoint later than the last row of a snapshot is past all of them
        self.tables = ("item", "ledger", "line", "pair")  # what a feed of everything is of
        self.has_others = False  # whose snapshots cannot be judged, or whose past cannot be told
        self.sleepy = 0.1 if dice.random() < 0.4 else 0.0  # how often it forgets to read for a while
        self.losses: list[str] = []
        self.pressure = "healthy"  # the last it was told of
        self._window = 0.0  # wall time at which the rows of a snapshot were over
        self._finish = threading.Event()
        self.goal = -1
        self._checkpoints: set[int] = set()  # times of those at the goal
        self.is_done = False

    # --- life ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Read in sessions until the goal is reached."""
        try:
            while not self.is_done and self.goal != GIVE_UP:
                self._turn()
        except Exception as error:
            self.defects.append(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.ask.close()

    def calm(self) -> None:
        """Read without random pauses, seeks or disconnects from the start."""
        self._finish.set()

    def finish(self, goal: int) -> None:
        """Read up to `goal` without further random behaviour, or stop if it is GIVE_UP."""
        self.goal = goal
        self._finish.set()

    @property
    def is_wild(self) -> bool:
        return not self._finish.is_set()

    def chance(self, share: float) -> bool:
        return self.is_wild and self.random.random() < share

    def nap(self, seconds: float) -> None:
        if self.is_wild:
            self._finish.wait(seconds)

    def _turn(self) -> None:
        try:
            self.prepare()
            self.session()
        except (Gone, Ended):
            time.sleep(0.03)
        except (Refused, Status) as error:
            if not self._is_ordinary(error):
                self.defects.append(f"{type(error).__name__} {error}")
            time.sleep(0.1)

    def _is_ordinary(self, error: Refused | Status) -> bool:
        if isinstance(error, Refused):
            return error.code in LATER
        if error.status == 410 and not self.sub:  # a stream without a subscription is refused where it is lost
            self.note(LOST, body=error.body)
            self.lost("410")
            return True
        return error.status in (429, 503, 507)

    def note(self, kind: str, offset: int = 0, body: Any = None, ts: int = 0) -> None:
        self.journal.append(Entry(kind, offset, body, ts, time.monotonic()))

    # --- the subscription ----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Ensure that there is a subscription that is not paused and whose cursor is known."""
        if not self.sub:
            found = self.ask("cdc.subscribe_table", **self.spec.subscribe_params(), name=self.name)
            self.sub, self.acked = found["sub_id"], found["offset"]
        if self.is_paused:
            self.ask("cdc.resume", sub_id=self.sub)
            self.is_paused = False
        self.know_cursor()

    def know_cursor(self) -> None:
        """Ask the server for the acknowledged offset if it is unknown."""
        if self.acked is None:
            (held,) = self.ask("cdc.list", sub_id=self.sub)["subscriptions"]
            self.acked = int(held["acked_offset"])

    def whims(self) -> None:
        """Make random requests between two sessions: acks, seeks, pauses."""
        if self.base is None or self.last is None or self.rows_due:
            return
        if self.chance(0.3):
            self.send_ack(max(self.base, self.last - self.random.randrange(60)))
        if self.chance(0.08) and self._seek(self.random.randint(self.base, self.last)):
            self.last = self.acked

    def send_ack(self, offset: int) -> None:
        known, self.acked = self.acked, None
        answer = self.ask("cdc.ack", sub_id=self.sub, offset=offset)
        self.acked = max(known or 0, int(answer["acked_offset"]))
        self.has_shown = True

    def _seek(self, offset: int) -> bool:
        known, self.acked = self.acked, None
        try:
            self.acked = int(self.ask("cdc.seek", sub_id=self.sub, offset=offset)["acked_offset"])
        except Refused as error:
            if error.code != "resnapshot_required":
                raise
            self.acked = known
            return False
        return True

    def pause(self) -> None:
        self.is_paused = True
        self.ask("cdc.pause", sub_id=self.sub)

    # --- what it is told -----------------------------------------------------------------------------------------

    def hear(self, said: Said) -> None:
        """Record one frame of a stream."""
        id, word, body = said
        if word in OPS:
            self.hear_change(body)
            if isinstance(id, str):
                self.place = id[2:]
        elif word == "snapshot_end":
            self.rows_over(body["offset"])
        elif word == "snapshot_restart":
            self.note(RESTART)
        elif word == "caught_up":
            self.caught_up(body["offset"])
        elif word == "checkpoint":
            self.hear_checkpoint(parse_ts(body["ts"]), body["offset"])
        elif word == "resnapshot":
            self.note(LOST, body=body["reason"])
            self.lost(body["reason"], body)
        elif word == "backpressure":
            self.pressure = body["state"]
        elif word == "failed" and (body["code"] in LATER or body["code"] == "conflict" and self.rows_due):
            raise Ended  # among the rows: our connection before this one had not ended yet
        else:
            self.defects.append(f"{word}: {body}")
            raise Ended

    def hear_change(self, body: dict[str, Any]) -> None:
        if body.get("snapshot"):
            self.note(ROW, body["offset"], body)
            return
        self.note(CHANGE, body["offset"], body)
        self.last = body["offset"]

    def rows_over(self, offset: int) -> None:
        self.note(ROWS_END, offset)
        self.rows_due, self.place, self.last = False, None, offset
        self._window = time.time() * 1000 + 1

    def caught_up(self, offset: int) -> None:
        self.note(CAUGHT_UP, offset)
        self.base = offset if self.base is None else self.base
        self.last = max(self.last or 0, offset)

    def hear_checkpoint(self, ts: int, offset: int) -> None:
        if self.trusts_time and self.base is None and ts_ms(ts) > self._window:
            self.caught_up(offset)  # whoever knows everything up to a time after the rows is past them
        self.note(CHECKPOINT, offset, ts=ts)
        self.last = max(self.last or 0, offset)
        if self.goal >= 0 and offset >= self.goal:
            self._checkpoints.add(ts)
            self.is_done = len(self._checkpoints) > 1

    # --- when the log is gone ------------------------------------------------------------------------------------

    def lost(self, reason: str, body: dict[str, Any] | None = None) -> None:
        """Start again, from whole tables by the URLs that came with the error, or from a snapshot; raise Ended."""
        self.losses.append(reason)
        may_subscribe = self.spec.tables or not self.has_others
        if self.sub and self.spec.folds and may_subscribe and self.random.random() < 0.4:
            self._subscribe_anew()
            raise Ended
        urls = dict((body or {}).get("snapshot_urls") or {})
        urls = {table: url for table, url in urls.items() if table in (self.spec.tables or self.tables)}
        if body and not urls and len(self.spec.tables) == 1:
            urls = {self.spec.tables[0]: body["snapshot_url"]}
        while self.goal != GIVE_UP:
            try:
                if self._load(urls):
                    raise Ended
            except Gone:
                time.sleep(0.05)
            urls = {}

    def _subscribe_anew(self) -> None:
        self.spec = self.spec if self.spec.start == "snapshot" else _from_snapshot(self.spec)
        self.name, self.sub = self.name + "+", ""
        self.rows_due, self.place, self.last, self.base, self.acked = True, None, None, None, None
        self.has_shown = False
        self.note(RESTART)

    def _load(self, urls: dict[str, str]) -> bool:
        """Load whole tables at one offset and continue from there; return False if that offset has expired, too."""
        with httpx.Client(timeout=PATIENCE, base_url=self.server.url) as http:
            try:
                urls = urls or self._present(http)
                found, offset = {}, 0
                for table, url in urls.items():
                    answer = http.get(f"{url}&format={self.spec.format}")
                    if answer.status_code != 200:
                        self._odd_snapshot(answer)
                        return False
                    found[table] = [json.loads(line) for line in answer.text.splitlines()]
                    offset = int(answer.headers["x-headwater-offset"])
            except httpx.HTTPError as error:
                raise Gone(str(error)) from error
        if self.sub and not self._seek(offset):
            return False
        self.note(LOADED, offset, found)
        self.has_shown = True
        self.last, self.base, self.rows_due, self.place = offset, offset, False, None
        return True

    def _odd_snapshot(self, answer: httpx.Response) -> None:
        is_past = answer.status_code == 501 and "full before images" in answer.text  # of a table without old rows
        if not (is_past and self.has_others) and answer.status_code not in (404, 409, 410, 503, 507):
            self.defects.append(f"snapshot: {answer.status_code} {answer.text[:200]}")
        time.sleep(0.05)

    def _present(self, http: httpx.Client) -> dict[str, str]:
        """Return a URL of every wanted table at the server's current version."""
        tables = self.spec.tables or self.tables
        answer = http.get(f"/api/v1/snapshot/{DB}/{tables[0]}")
        if answer.status_code != 307:
            self._odd_snapshot(answer)
            raise Gone("no version")
        version = answer.headers["location"].partition("?")[2]
        return {table: f"/api/v1/snapshot/{DB}/{table}?{version}" for table in tables}

    def session(self) -> None:
        raise NotImplementedError


def _from_snapshot(spec: Spec) -> Spec:
    return Spec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {"start": "snapshot"})
