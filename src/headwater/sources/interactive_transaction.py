"""Interactive transactions, as far as they are alike in every database: steps one by one, and an end from outside."""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from headwater.errors import TxExpired
from headwater.sources.write import Work, Written

T = TypeVar("T")


class Interactive(ABC):
    """Fulfils `Tx`. Its methods may be called from any thread.

    Its steps run one by one on a thread of its own, so that one that waits for others never keeps those from going
    on. Whoever ends it from outside interrupts what runs until the step gives up.
    """

    nudge_seconds = 0.05  # an interrupt between two statements of a step is lost: it is repeated

    def __init__(self, *, read_only: bool) -> None:
        self.id = "tx_" + secrets.token_hex(8)
        self.read_only = read_only
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="headwater-tx")  # its thread starts with a step
        # Guards the connection and changes of `_state`. The expiry takes it after interrupting what runs.
        self._lock = threading.Lock()
        self._doomed = False  # it is being ended from outside: what runs now fails for that reason
        self._state = "open"

    @property
    def is_over(self) -> bool:
        """Whether it has ended, by whatever cause."""
        return self._state != "open"

    def run(self, work: Work[T]) -> Future[T]:
        """Run `work` inside; its own failure undoes only itself."""
        return self._submit(lambda: self._run(work))

    def commit(self) -> Future[Written[None]]:
        """Make it durable."""
        return self._submit(self._commit)

    def rollback(self) -> Future[None]:
        """Forget it."""
        return self._submit(self._rollback)

    def abandon(self) -> None:
        """Roll back if still open: the server is going down."""
        self._expire()

    # --- what a database says ------------------------------------------------------------------------------------

    @abstractmethod
    def _count(self, more: int) -> None:
        """So many more steps are queued or running."""

    @abstractmethod
    def _step(self, work: Work[T]) -> T:
        """Run `work` so that it can be undone alone."""

    @abstractmethod
    def _failed(self, error: BaseException) -> BaseException:
        """Undo the step that failed so, and say what the caller is told."""

    @abstractmethod
    def _commit(self) -> Written[None]:
        """Commit, and end."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Make what runs fail soon."""

    @abstractmethod
    def _end(self, state: str) -> None:
        """Leave the database as it must be, give everything back. The lock is held."""

    # --- steps ---------------------------------------------------------------------------------------------------

    def _submit(self, step: Callable[[], T]) -> Future[T]:
        self._count(1)
        try:
            future = self._worker.submit(step)
        except RuntimeError:  # the worker was sent home when the transaction ended
            future = Future()
            future.set_exception(self._over())
        future.add_done_callback(lambda _: self._count(-1))
        return future

    def _run(self, work: Work[T]) -> T:
        with self._lock:
            self._check_open()
            try:
                return self._step(work)
            except BaseException as error:
                ours = self._failed(error)
                if ours is error:
                    raise
                raise ours from error

    def _rollback(self) -> None:
        with self._lock:
            self._check_open()
            self._end("rolled back")

    # --- its end -------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        """End it from outside, whatever it is doing."""
        self._doomed = True
        while not self._lock.acquire(timeout=self.nudge_seconds):
            if self.is_over:
                return
            self._interrupt()
        try:
            if not self.is_over:
                self._end("expired")
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if self.is_over:
            raise self._over()

    def _over(self) -> TxExpired:
        if self._state == "committed":
            return TxExpired("the transaction is over: committed", hint="It was kept. Begin another one.")
        return TxExpired(f"the transaction is over: {self._state if self.is_over else 'expired'}")
