"""The stream of committed transactions of a source, and the proof that the log is its history. Used by capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from headwater.model.change import Transaction
from headwater.sources.read import Look

STOPPED = "stopped"  # a note: capture ended in order, and everything it reported is in the log


class Notes(Protocol):
    """Small durable texts kept with the log, by which a source recognises its own history."""

    def note(self, name: str) -> str:
        """Return the text kept under `name`, or ""."""
        ...

    def set_notes(self, **notes: str) -> None:
        """Keep these durably, in one step."""
        ...


class Capturable(Protocol):
    """A source as capture follows it. Every method is thread-safe unless it says otherwise."""

    name: str
    beginning: int  # once `prove` returned "": the offset after which a new log begins, above what a lost one had

    def prove(self, *, generation: str, latest: int, read: Callable[[int], Iterator[Transaction]]) -> str:
        """Return why the log (its generation, its newest offset) is not this database's history; "" if it is.

        `read(after)` gives the log's own transactions, for comparing what both sides still hold.
        """
        ...

    def restart(self, *, generation: str, first: int) -> int:
        """Begin a new generation at offset `first`, or above all offsets so far; return its first offset."""
        ...

    def reopen(self) -> None:
        """Connect again: another database is now behind the name."""
        ...

    def look(self) -> Look:
        """Return the head of the database now. Cheap: one small read."""
        ...

    def glance(self) -> Look | None:
        """Return the same if it takes microseconds and waits for nobody; else None."""
        ...

    def follow(self, *, after: int) -> Iterator[Transaction]:
        """Yield committed transactions after offset `after`, in order, up to the head of the call; then stop.

        Large ones come in parts. `ts` is 0: capture stamps it. Called from the capture thread only.
        """
        ...

    def wait(self, timeout: float) -> None:
        """Sleep until something may have been committed, `wake` is called, or `timeout` passes."""
        ...

    def wake(self) -> None:
        """End a `wait` now."""
        ...

    def acknowledge(self, upto: int) -> None:
        """Everything at or below `upto` is durable in the log: the source may forget it, when it suits it."""
        ...

    def release(self, reason: str) -> None:
        """Stop following because the log is lost, and acknowledge no more writes that nobody could follow."""
        ...
