"""Stream of committed transactions of a source, and the proof that the log is its history. Used by capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from headwater.model.change import Transaction
from headwater.sources.read import HeadSource

STOPPED = "stopped"  # name of the note for a clean stop: everything that capture reported is in the log


class LogNotes(Protocol):
    """Small durable texts stored with the log, by which a source recognises its own history."""

    def note(self, name: str) -> str:
        """Return the text stored under `name`, or ""."""

    def set_notes(self, **notes: str) -> None:
        """Store these texts durably and atomically."""


class Capturable(HeadSource, Protocol):
    """A source as capture uses it. Every method is thread-safe unless its docstring says otherwise."""

    name: str
    # After `prove` returned "": the offset after which a new log begins, above all offsets of a lost log.
    beginning: int

    def prove(self, *, generation: str, latest: int, read: Callable[[int], Iterator[Transaction]]) -> str:
        """Return why the log (its generation, its newest offset) is not this database's history; "" if it is.

        `read(after)` yields the log's own transactions, for comparison of the changes that both sides still hold.
        """

    def restart(self, *, generation: str, first: int) -> int:
        """Begin a new generation at offset `first`, or above all used offsets; return its first offset."""

    def reopen(self) -> None:
        """Close the connections and connect to the database that the name refers to now."""

    def follow(self, *, after: int) -> Iterator[Transaction]:
        """Yield committed transactions after offset `after`, in order, up to the head at the time of the call.

        Large transactions are yielded in parts. `ts` is 0: capture sets it. Called from the capture thread only.
        """

    def wait(self, timeout: float) -> None:
        """Sleep until something may have been committed, `wake` is called, or `timeout` passes."""

    def wake(self) -> None:
        """End a `wait` now, or the next one at once if nothing waits."""

    def acknowledge(self, upto: int) -> None:
        """Allow the source to discard changes at or below `upto`, which are durable in the log."""

    def release(self, reason: str) -> None:
        """Stop reading changes because the log is lost, and refuse writes that could no longer be captured."""
