"""A log in front of another: the part that only forwards."""

from __future__ import annotations

from headwater.log.log import BlockInfo, Log


class WrappedLog:
    """Forwards to `wrapped`; a subclass adds what differs. See `Log`."""

    def __init__(self, wrapped: Log) -> None:
        self.wrapped = wrapped

    @property
    def generation(self) -> str:
        """Names the unbroken history this log holds. Offsets compare only within one generation."""
        return self.wrapped.generation

    @property
    def generation_reason(self) -> str:
        """Why this generation began: "created", or the `reason` given to `restart`."""
        return self.wrapped.generation_reason

    @property
    def generation_first(self) -> int:
        """The first offset of this generation."""
        return self.wrapped.generation_first

    def reach(self, after: int, *, changes: int, bytes: int) -> int:
        """See Log. Only durable changes count."""
        return self.wrapped.reach(after, changes=changes, bytes=bytes)

    def raise_ceiling(self, ts: int) -> None:
        """Promise, durably, that times up to `ts` may be given out from now on."""
        self.wrapped.raise_ceiling(ts)

    def note(self, name: str) -> str:
        """Return a small durable text stored with the blocks (the source's nonce, its identity); "" if unset."""
        return self.wrapped.note(name)

    def set_notes(self, **notes: str) -> None:
        """Keep `notes` durably, all in one step."""
        self.wrapped.set_notes(**notes)

    def blocks(self) -> list[BlockInfo]:
        """Return the blocks that are kept, the oldest first."""
        return self.wrapped.blocks()

    def overdue(self, after: int) -> int:
        """Return the bytes of the blocks after offset `after` that the last `retain` kept only for its `hold`."""
        return self.wrapped.overdue(after)

    def merge(self) -> int:
        """Join one bounded run of small blocks; returns how many blocks went away."""
        return self.wrapped.merge()
