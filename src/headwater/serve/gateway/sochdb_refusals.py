"""Errors of feeds, converted to SochDB's sequence numbers and field names. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.errors import InvalidRequest, OffsetExpired
from headwater.feeds.deliver.stream import Stream

_BEYOND = "Send the last sequence that you received plus 1, or 0 to begin now."


def in_sequences(error: InvalidRequest, start: int, fields: Mapping[str, str]) -> InvalidRequest:
    """Return `error`, reworded in place for a request from sequence `start` on; `fields` maps our names to SochDB's."""
    place = f"from_offset {start - 1} "
    if place in error.message:
        message = error.message.replace(place, f"start_sequence {start} ")
        error.message, error.hint = message.replace("latest offset", "latest sequence"), _BEYOND
    for ours, theirs in fields.items():
        error.message = error.message.replace(f"`{ours}`", f"`{theirs}`")
        error.hint = error.hint.replace(f"`{ours}`", f"`{theirs}`")
    return error


def overrun(stream: Stream) -> OffsetExpired:
    """Return the error of a stream whose next change was evicted, with SochDB's message."""
    log = stream.consumer.log
    error = OffsetExpired(stream.cursor, log.horizon, log.latest)
    error.message = f"CDC overrun: requested seq {stream.cursor + 1} but oldest available is {log.horizon}"
    return error
