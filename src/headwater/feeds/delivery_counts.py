"""Tally: how many streams are open and how much went out on them, by transport and by database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from headwater.feeds.arrow_batches import Batches
from headwater.feeds.deliver.stream import Stream
from headwater.feeds.deliver.stream_request import Opening

TRANSPORTS = ("sse", "websocket", "ndjson", "arrow", "grpc", "gateway")
Open = Iterable[tuple[Stream | Batches, Opening]]


class Tally:
    """Remembers what streams delivered that are over."""

    def __init__(self) -> None:
        self._over: Counter[tuple[str, str]] = Counter()  # by transport and database

    def ended(self, stream: Stream | Batches, opening: Opening) -> None:
        """Its reader is gone."""
        self._over[_place(stream, opening)] += stream.deliveries

    def streams(self, open: Iterable[Opening]) -> dict[str, int]:
        """How many are open, by transport."""
        found = dict.fromkeys(TRANSPORTS, 0)
        for opening in open:
            found[opening.transport] += 1
        return found

    def by_transport(self, open: Open) -> dict[str, int]:
        """What went out."""
        found = dict.fromkeys(TRANSPORTS, 0)
        for (transport, _), count in self._counted(open).items():
            found[transport] += count
        return found

    def by_database(self, open: Open, names: Sequence[str]) -> dict[str, int]:
        """What went out of those that are there."""
        found = dict.fromkeys(names, 0)
        for (_, db), count in self._counted(open).items():
            if db in found:
                found[db] += count
        return found

    def _counted(self, open: Open) -> Counter[tuple[str, str]]:
        found = self._over.copy()
        for stream, opening in open:
            found[_place(stream, opening)] += stream.deliveries
        return found


def _place(stream: Stream | Batches, opening: Opening) -> tuple[str, str]:
    return opening.transport, stream.seat.view.options.db
