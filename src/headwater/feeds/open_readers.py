"""The open streams and polls of a server: their limit, their clock, and how much they delivered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headwater.errors import LimitExceeded, Unavailable
from headwater.feeds.arrow_batches import Batches
from headwater.feeds.deliver.poll import Poll
from headwater.feeds.deliver.stream import Stream
from headwater.feeds.deliver.stream_request import Transport

TRANSPORTS = ("sse", "websocket", "ndjson", "arrow", "grpc", "gateway")


class OpenReaders:
    """The open streams and polls. Use it in the loop; any thread may read the counts."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self.streams: dict[Stream | Batches, Transport] = {}
        self.other_streams = 0  # change feeds of gRPC, under the same limit
        self._by_subscription: dict[str, set[Stream | Poll]] = {}
        self._closed: Counter[tuple[str, str]] = Counter()  # deliveries of closed streams by transport and database
        self._stopping = False

    def check_room(self) -> None:
        """Raise Unavailable if the server is stopping, LimitExceeded if `max_streams` streams are open."""
        if self._stopping:
            raise Unavailable("the server is stopping", hint="Connect again in a moment.")
        if len(self.streams) + self.other_streams >= self._max_streams:
            raise LimitExceeded(
                f"{self._max_streams} streams are open, and no more are granted",
                hint="Close streams that nobody reads, poll instead, or raise serve.max_streams.",
            )

    def add(self, id: str, reader: Stream | Poll) -> None:
        """Report changes of subscription `id` to `reader` from now on."""
        self._by_subscription.setdefault(id, set()).add(reader)

    def remove(self, id: str, reader: Stream | Poll) -> None:
        """Report nothing of subscription `id` to `reader` any more."""
        readers = self._by_subscription.get(id, set())
        readers.discard(reader)
        if not readers:
            self._by_subscription.pop(id, None)

    def remove_stream(self, stream: Stream | Batches) -> None:
        """Remove a stream that was closed, and keep the count of its deliveries."""
        self._closed[_labels(stream, self.streams.pop(stream))] += stream.deliveries
        if isinstance(stream, Stream) and stream.consumer.subscription is not None:
            self.remove(stream.consumer.subscription.id, stream)

    # --- events ------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Let every stream do what is due by the clock."""
        for stream in [stream for stream in self.streams if stream.is_due(now)]:
            stream.tick(now)

    def subscription_changed(self, id: str, closed: bool) -> None:
        """Report a pause, an ack or the end of a subscription to its readers."""
        for reader in list(self._by_subscription.get(id, ())):
            reader.consumer.closed = reader.consumer.closed or closed
            reader.changed()

    def database_dropped(self, db: str) -> None:
        """End the streams of `db`."""
        for stream in [stream for stream in self.streams if stream.consumer.view.options.db == db]:
            stream.consumer.closed = True
            stream.changed()

    def stop(self) -> None:
        """End every stream and answer every poll; refuse new ones."""
        self._stopping = True
        for reader in [*self.streams, *self.polls()]:
            reader.stop()

    # --- counts ------------------------------------------------------------------------------------------------------

    def polls(self) -> list[Poll]:
        """Return the polls that wait or are being answered."""
        everybody = [reader for readers in list(self._by_subscription.values()) for reader in list(readers)]
        return [reader for reader in everybody if isinstance(reader, Poll)]

    def count_streams(self) -> dict[str, int]:
        """Return the number of open streams by transport."""
        counts = dict.fromkeys(TRANSPORTS, 0)
        for opening in list(self.streams.values()):
            counts[opening.transport] += 1
        return counts

    def deliveries_by_transport(self) -> dict[str, int]:
        """Return the number of changes and rows that were sent on streams, by transport."""
        counts = dict.fromkeys(TRANSPORTS, 0)
        for (transport, _), count in self._deliveries().items():
            counts[transport] += count
        return counts

    def deliveries_by_database(self, names: Sequence[str]) -> dict[str, int]:
        """Return the number of changes and rows that were sent on streams, by database, for those in `names`."""
        counts = dict.fromkeys(names, 0)
        for (_, db), count in self._deliveries().items():
            if db in counts:
                counts[db] += count
        return counts

    def _deliveries(self) -> Counter[tuple[str, str]]:
        counts = self._closed.copy()
        for stream, opening in list(self.streams.items()):
            counts[_labels(stream, opening)] += stream.deliveries
        return counts


def _labels(stream: Stream | Batches, opening: Transport) -> tuple[str, str]:
    return opening.transport, stream.consumer.view.options.db
