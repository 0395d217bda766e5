"""An answer that is not ready yet, so that no thread has to wait for a commit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")
A = TypeVar("A")


class PendingAnswer(Generic[T]):
    """A future of the source, and the function that turns its value into the answer.

    `finish` runs where the answer is awaited, not in the thread that commits.
    """

    __slots__ = ("finish", "future")

    def __init__(self, future: Future[Any], finish: Callable[[Any], T]) -> None:
        self.future = future
        self.finish = finish

    def result(self, timeout: float | None = None) -> T:
        """Wait for the answer and return it."""
        return self.finish(self.future.result(timeout))

    def then(self, step: Callable[[T], A]) -> PendingAnswer[A]:
        """Return a pending answer that applies `step` to this one."""
        return PendingAnswer(self.future, lambda value: step(self.finish(value)))
