"""Pending: an answer that is on its way, so that nobody waits in a thread for a commit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")
A = TypeVar("A")


class Pending(Generic[T]):
    """A future of the source and the step that makes an answer of its value.

    `finish` runs where the answer is awaited, not in the thread that commits.
    """

    __slots__ = ("finish", "future")

    def __init__(self, future: Future[Any], finish: Callable[[Any], T]) -> None:
        self.future = future
        self.finish = finish

    def result(self, timeout: float | None = None) -> T:
        """Wait for the answer."""
        return self.finish(self.future.result(timeout))

    def then(self, step: Callable[[T], A]) -> Pending[A]:
        """The same answer, one step further."""
        return Pending(self.future, lambda value: step(self.finish(value)))
