"""The interface of a nemesis to a database: its writers, its faults, and its rows in the end.

Faults that fill its disk or shorten its log are here; other faults of our server are the same for every nemesis.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.guarantees.fault_driver import ServerFaults
from tests.guarantees.feed_oracle import Base, Spec, Truth
from tests.guarantees.feed_specs import WHERES, Wheres
from tests.guarantees.recorder import Recorder
from tests.guarantees.server_process import Asking, ServerProcess
from tests.guarantees.small_disk import SmallDisk
from tests.guarantees.writers import History

from headwater.model.change import Transaction

Run = Callable[[threading.Event], None]  # a writer, until it is told to stop
Rows = Mapping[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]  # by table: keys and rows


class World(ServerFaults):
    """The database of one run, our server over it, and the history of both."""

    must: tuple[str, ...] = ()  # happens in every run
    may: tuple[str, ...] = ("kill", "kill twice", "end", "pause", "calm", "fill")
    settings = ""
    short = 500  # changes that a log keeps which forgets
    quota = (8, 16)  # acknowledged writes between two events, at least and at most
    patience = 5.0  # seconds for them
    readers, watchers, pests = 9, 3, True
    tables: tuple[str, ...] = ("item", "ledger", "line", "pair")  # of one shape, or with columns added
    has_others = False  # tables beside these, whose snapshots cannot be judged, or whose past cannot be told
    wheres: Wheres = WHERES
    watched: tuple[tuple[str, str, str], ...] = (  # of queries: tables, columns in their order, conditions
        ("item", "id, n, name", "n > 30"),
        ("item", "id, price", "coalesce(price, 1) * 2 > 0.5"),
        ("item", "id, n", "id < 30 AND n < 40"),
        ("item", "id, name", "length(name) > 2"),
    )
    added: str | None = None  # what every row has in a column that is added
    trusts_time = True  # no row is ahead of the log
    keeps_all = True  # the whole log is read, also where it forgets

    def __init__(self, seed: str, folder: Path) -> None:
        self.seed, self.folder, self.data = seed, folder, folder / "data"
        self.random = random.Random(seed)
        self.disk = SmallDisk(self.data)
        self.retention = '"none"'
        self.server = ServerProcess(
            self.data, self.configured(), databases=self.databases(), said=folder / "server.err"
        )
        self.history = History()
        self.recorder = Recorder(self.data / "main.log.db")
        self.bases: list[Base] = []
        self.is_one_history = True  # False once an older state came back
        self.may_lose = False  # readers may be told that their place is lost
        self._is_over = threading.Event()  # the newest event
        self._is_over.set()

    # --- what a database is ----------------------------------------------------------------------------------------

    def databases(self) -> list[str]:
        """Return the databases for the server's command line."""
        return []

    def prepare(self) -> None:
        """Create the tables and start the server."""
        raise NotImplementedError

    def writers(self) -> list[Run]:
        """Return the writers; each runs in its own thread."""
        raise NotImplementedError

    def begin(self) -> None:
        """Start the writers in other processes."""

    def leave(self) -> None:
        """Stop the writers in other processes and add the answers they received to the history."""

    def say_last(self) -> None:
        """Commit one last change: a row of `ledger` with the mark `last`."""
        ask = Asking(self.server)
        ask("sql.exec", sql="INSERT INTO ledger(mark, n) VALUES ('last', 0)")
        ask.close()

    def rows(self) -> Rows:
        """Return the rows of every table in `tables`, for the readers' truth."""
        return {}

    def fit(self, spec: Spec) -> Spec:
        """Return the request of a reader, reduced to what can be checked in this world."""
        return spec

    def judge(self, parts: list[Transaction], truth: Truth | None) -> list[str]:
        """Return further violations in the log at the end; without readers `truth` is None."""
        return []

    def close(self, *, keep: bool = False) -> None:
        """Stop everything."""
        self.server.close()
        self.disk.close(self.folder / "kept" if keep else None)

    # --- what happens to our server ----------------------------------------------------------------------------------

    def configured(self) -> str:
        return self.settings.replace("{retention}", self.retention)

    def events(self, rounds: int) -> list[str]:
        """Return `rounds` events in random order."""
        may = [event for event in self.may if event != "fill" or self.disk.is_real]
        found = list(self.must) + [self.random.choice(may) for _ in range(rounds - len(self.must))]
        self.random.shuffle(found)
        return found

    def happen(self, event: str) -> None:
        """Cause one event; hold writers back during it if the log is short."""
        if self.is_short:
            self._is_over.clear()
        try:
            super().happen(event)
        finally:
            self._is_over.set()

    @property
    def is_short(self) -> bool:
        """Return whether the log retains few changes."""
        return self.retention == str(self.short)

    def may_write(self) -> None:
        """Hold a writer back until the recorder can read what it writes: a short log may evict at once what was written
        while the server was down.
        """
        self._is_over.wait()
        self.recorder.may_write()

    def do_fill(self) -> None:
        """Fill the disk of the log for a moment; sometimes kill the server meanwhile."""
        self.disk.fill()
        try:
            time.sleep(0.5 + self.random.random() / 2)
            if self.random.random() < 0.3:
                self.server.kill()
        finally:
            self.disk.free()
        if not self.server.is_running:
            self.server.start()

    def do_forget(self) -> None:
        """Restart the server with a short log, which it has from now on."""
        self.may_lose = True
        self.server.stop()
        self.recorder.read()
        self.retention = str(self.short)
        self.server.configure(self.configured())
        self.server.start()
