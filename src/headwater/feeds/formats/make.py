"""The encoder of a shape, by the name of its format."""

from __future__ import annotations

from headwater.feeds.formats.cloudevents import CloudEvents
from headwater.feeds.formats.cockroach import Cockroach
from headwater.feeds.formats.debezium import Debezium
from headwater.feeds.formats.encoder import Encoder, Maker
from headwater.feeds.formats.native import objects, plain
from headwater.feeds.formats.sochdb import SOCHDB, Sochdb
from headwater.feeds.options import Shape

MAKERS: dict[str, Maker] = {
    "objects_json": objects,
    "plain_json": plain,
    "debezium_json": Debezium,
    "cloudevents_json": CloudEvents,
    "cockroach_wrapped_json": Cockroach,
}
OWN: dict[str, Maker] = {SOCHDB: Sochdb}  # of transports whose changes look one way only: nobody asks for them by name


def encoder(shape: Shape) -> Encoder:
    """Writes changes in `shape`, whose format was checked when it was asked for."""
    return (MAKERS.get(shape.format) or OWN[shape.format])(shape)
