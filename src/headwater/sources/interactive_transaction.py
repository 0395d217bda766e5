"""Interactive transactions, common part of all databases: sequential steps, and termination from outside."""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from headwater.errors import TxExpired
from headwater.sources.write import Tx, Work, WriteResult

T = TypeVar("T")


class Interactive(Tx, ABC):
    """Common part of the implementations of `Tx`. Thread-safe.

    Steps run one by one on the transaction's own thread, so that a step that waits for other transactions never blocks
    them. Termination from outside interrupts the running step repeatedly until the step fails.
    """

    nudge_seconds = 0.05  # interval between interrupts: an interrupt between two statements of a step has no effect

    def __init__(self, *, read_only: bool) -> None:
        self.id = "tx_" + secrets.token_hex(8)
        self.read_only = read_only
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="headwater-tx")  # the thread starts with the first step
        # Guards the connection and changes of `_state`. `expire` takes it after interrupting the running step.
        self._lock = threading.Lock()
        self._doomed = False  # set when terminated from outside: a running step fails for that reason
        self._state = "open"

    @property
    def is_over(self) -> bool:
        return self._state != "open"

    def run(self, work: Work[T]) -> Future[T]:
        return self._submit(lambda: self._run(work))

    def commit(self) -> Future[WriteResult[None]]:
        return self._submit(self._commit)

    def rollback(self) -> Future[None]:
        return self._submit(self._rollback)

    # --- implemented per database --------------------------------------------------------------------------------

    @abstractmethod
    def _count(self, more: int) -> None:
        """Add `more` to the number of queued or running steps."""

    @abstractmethod
    def _step(self, work: Work[T]) -> T:
        """Run `work` so that it can be undone alone."""

    @abstractmethod
    def _failed(self, error: BaseException) -> BaseException:
        """Undo the step that failed with `error`; return the error for the caller."""

    @abstractmethod
    def _commit(self) -> WriteResult[None]:
        """Commit and end the transaction; return the offset and tables of its changes."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Ask the database to stop the running step, which then fails soon."""

    @abstractmethod
    def _end(self, state: str) -> None:
        """Roll back if needed and release all resources. The caller holds the lock."""

    # --- steps ---------------------------------------------------------------------------------------------------

    def _submit(self, step: Callable[[], T]) -> Future[T]:
        self._count(1)
        try:
            future = self._worker.submit(step)
        except RuntimeError:  # the worker was shut down when the transaction ended
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

    # --- end -----------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Roll back because time is up or the server stops: interrupt a running step, and wait until it has ended."""
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
            return TxExpired(
                "the transaction is over: committed", hint="Its changes are stored. Begin another transaction."
            )
        return TxExpired(f"the transaction is over: {self._state if self.is_over else 'expired'}")
