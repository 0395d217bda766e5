"""The shared parts of all writers of a nemesis: random works, each with its own mark, and a history of their answers.

`ApiWriter` writes through our server. Each work returns how many changes with its mark the log must have.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tests.guarantees.server_process import Asking, Gone, Refused

# Nothing was kept: the answer says so. `unavailable` and the like leave it open.
NOTHING_KEPT = {"duplicate_key", "invalid_request", "conflict", "not_found", "tx_expired", "busy"}
OPEN_END = {"unavailable", "storage_full"}
EQUAL = {"op": "eq", "a": {"col": "id"}, "b": {"param": 0}}
Work = Callable[[str], int]


class History:
    """The answers that clients received; used from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acknowledged: dict[str, int] = {}
        self.refused: set[str] = set()
        self.places: dict[str, dict[str, int]] = {}  # by mark: tables and the offsets that were answered
        self.defects: list[str] = []
        self.codes: Counter[str] = Counter()

    def acknowledge(self, mark: str, changes: int) -> None:
        with self._lock:
            self.acknowledged[mark] = changes

    def refuse(self, mark: str) -> None:
        with self._lock:
            self.refused.add(mark)

    def defect(self, text: str) -> None:
        with self._lock:
            self.defects.append(text)

    def saw(self, code: str) -> None:
        with self._lock:
            self.codes[code] += 1


class ApiWriter:
    """One thread with its own random choices and connection; `may_write` holds it back while the recorder is behind."""

    pause = 0.012  # seconds between two works, at most
    open_end = OPEN_END
    works: Sequence[tuple[int, Work]]
    keeps_places: ClassVar[bool] = False  # whether the offset of its answer is that of its last row

    def __init__(
        self,
        ask: Asking,
        history: History,
        dice: random.Random,
        name: str,
        may_write: Callable[[], object] = lambda: None,
    ) -> None:
        self.ask, self.history, self.random, self.name = ask, history, dice, name
        self.may_write = may_write
        self.count = 0
        self._causality: dict[str, Any] = {}  # of the newest answer

    def run(self, stop: threading.Event) -> None:
        """Write until `stop` is set."""
        weights = [weight for weight, _ in self.works]
        try:
            while not stop.wait(self.random.random() * self.pause):
                self.may_write()
                self.count += 1
                (_, work), mark = self.random.choices(self.works, weights)[0], f"{self.name}-{self.count}"
                self.attempt(work, mark)
        finally:
            self.ask.close()

    def attempt(self, work: Work, mark: str) -> None:
        """Run one work and record the answer its client received."""
        try:
            changes = work(mark)
            if changes and self.keeps_places:
                deps = self._causality["deps"]
                self.history.places[mark] = {each["table"].partition(".")[2]: int(each["v"]) for each in deps}
            self.history.acknowledge(mark, changes)
            self.history.saw("ok")
        except Refused as error:
            self.history.saw(f"{work.__name__} {error.code}")
            if error.code in NOTHING_KEPT:
                self.history.refuse(mark)
            elif error.code not in self.open_end:
                self.history.defect(f"{work.__name__}: {error}")
        except Gone:
            self.history.saw("gone")
            time.sleep(0.02)  # the server is down: others work meanwhile

    # --- what works are made of ----------------------------------------------------------------------------------

    def sql(self, text: str, *args: Any, **more: Any) -> int:
        """Run a statement; return the number of affected rows."""
        found = self.ask("sql.exec", sql=text, args=list(args), **more)["result"]
        self._causality = found.get("causality") or {}
        return int(found["affected"])

    def data(self, method: str, **params: Any) -> int:
        """Call a method of data.*; return the number of affected rows."""
        found = self.ask(f"data.{method}", **params)
        self._causality = found.get("causality") or {}
        return int(found["affected"])

    def step(self, tx: str, text: str, *args: Any) -> int:
        """Run a statement in a transaction; raise Refused without an answer, as nothing can have been committed."""
        try:
            return self.sql(text, *args, tx=tx)
        except Gone as error:
            raise Refused({"code": "tx_expired", "message": "never committed"}) from error

    def commit(self, tx: str, changes: int) -> int:
        """Commit the transaction, or by random choice roll it back."""
        if self.random.random() < 0.2:
            self.ask("tx.rollback", tx=tx)
            raise Refused({"code": "tx_expired", "message": "rolled back on purpose"})
        self._causality = self.ask("tx.commit", tx=tx).get("causality") or {}
        return changes

    def must_fail(self, mark: str, changes: int, why: str) -> int:
        """Record a violation: a statement that must fail was accepted."""
        self.history.defect(f"{mark}: {why} was accepted")
        return changes
