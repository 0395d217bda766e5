"""The encoder of a shape, by the name of its format."""

from __future__ import annotations

from headwater.feeds.formats.cloudevents import CloudEvents
from headwater.feeds.formats.cockroach import Cockroach
from headwater.feeds.formats.debezium_quickly import debezium
from headwater.feeds.formats.encoder import Encoder, Maker
from headwater.feeds.formats.native import objects, plain
from headwater.feeds.options import Shape

MAKERS: dict[str, Maker] = {
    "objects_json": objects,
    "plain_json": plain,
    "debezium_json": debezium,
    "cloudevents_json": CloudEvents,
    "cockroach_wrapped_json": Cockroach,
}


def encoder(shape: Shape) -> Encoder:
    """Writes changes in `shape`, whose format was checked when it was asked for."""
    return MAKERS[shape.format](shape)
