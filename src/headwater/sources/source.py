"""A source: one database that can be captured, read, queried and written."""

from __future__ import annotations

from typing import Protocol

from headwater.sources.capture_stream import Capturable
from headwater.sources.query import Queryable
from headwater.sources.write import Writable


class Source(Capturable, Queryable, Writable, Protocol):
    """One database. Every method is thread-safe unless its docstring says otherwise."""

    def close(self) -> None:
        """Finish queued writes and release the database."""
