"""Why a feed was refused, in the words of SochDB's requests: they count sequences, and name their own fields. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.errors import InvalidRequest

_BEYOND = "Sequences are given out by this server: send one more than the last that you received, or 0 to begin now."


def in_sequences(error: InvalidRequest, start: int, fields: Mapping[str, str]) -> InvalidRequest:
    """`error` of a feed that was to begin with the sequence `start`; `fields` are the names of ours and of theirs."""
    place = f"from_offset {start - 1} "
    if place in error.message:
        told = error.message.replace(place, f"start_sequence {start} ")
        error.message, error.hint = told.replace("latest offset", "latest sequence"), _BEYOND
    for ours, theirs in fields.items():
        error.message = error.message.replace(f"`{ours}`", f"`{theirs}`")
        error.hint = error.hint.replace(f"`{ours}`", f"`{theirs}`")
    return error
