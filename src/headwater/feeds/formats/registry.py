"""The encoders by the name of their format."""

from __future__ import annotations

from collections.abc import Callable

from headwater.feeds.formats.cloudevents import CloudEvents
from headwater.feeds.formats.cockroach import Cockroach
from headwater.feeds.formats.debezium_encoder import debezium
from headwater.feeds.formats.encoder import Encoder, Maker
from headwater.feeds.formats.gateway import GATEWAY, Gateway
from headwater.feeds.formats.native import objects, plain
from headwater.feeds.formats.sochdb import EVENT, WATCH, Events, WatchKeyEvents
from headwater.feeds.options import Shape
from headwater.model import formats
from headwater.sources.read import Readable

MAKERS: dict[str, Maker] = {
    formats.OBJECTS: objects,
    formats.PLAIN: plain,
    formats.DEBEZIUM: debezium,
    formats.CLOUDEVENTS: CloudEvents,
    formats.COCKROACH: Cockroach,
}


OWN: dict[str, Maker] = {GATEWAY: Gateway}  # the format of a transport that has only one
# These encoders write keys as bytes, in the order of the source.
WITH_KEYS: dict[str, Callable[[Shape, Readable | None], Encoder]] = {EVENT: Events, WATCH: WatchKeyEvents}


def encoder(shape: Shape, source: Readable | None = None) -> Encoder:
    """Return the encoder of `shape`, whose format must be known; `source` provides the order of keys."""
    made = WITH_KEYS.get(shape.format)
    return (MAKERS | OWN)[shape.format](shape) if made is None else made(shape, source)
