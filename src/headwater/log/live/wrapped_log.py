"""A log in front of another: the part that only forwards."""

from __future__ import annotations

from headwater.log.log import Held, Log


class WrappedLog:
    """Forwards to `wrapped`; a subclass adds what differs. See `Log`."""

    def __init__(self, wrapped: Log) -> None:
        self.wrapped = wrapped

    @property
    def generation(self) -> str:
        """See Log."""
        return self.wrapped.generation

    @property
    def generation_reason(self) -> str:
        """See Log."""
        return self.wrapped.generation_reason

    @property
    def generation_first(self) -> int:
        """See Log."""
        return self.wrapped.generation_first

    def reach(self, after: int, *, changes: int, bytes: int) -> int:
        """See Log. Only durable changes count."""
        return self.wrapped.reach(after, changes=changes, bytes=bytes)

    def raise_ceiling(self, ts: int) -> None:
        """See Log."""
        self.wrapped.raise_ceiling(ts)

    def note(self, name: str) -> str:
        """See Log."""
        return self.wrapped.note(name)

    def set_notes(self, **notes: str) -> None:
        """See Log."""
        self.wrapped.set_notes(**notes)

    def blocks(self) -> list[Held]:
        """See Log."""
        return self.wrapped.blocks()

    def overdue(self, after: int) -> int:
        """See Log."""
        return self.wrapped.overdue(after)

    def merge(self) -> int:
        """See Log."""
        return self.wrapped.merge()
