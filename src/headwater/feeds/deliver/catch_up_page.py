"""Pages of the log as frames of one transport, for streams that catch up."""

from __future__ import annotations

from typing import NamedTuple

from headwater.errors import HeadwaterError
from headwater.feeds.filters.filter import NewerThanSnapshot
from headwater.feeds.formats.encoder import Frames, WritesFrames
from headwater.feeds.formats.frame import Frame, TemplateFrame
from headwater.feeds.groups.log_reader import SCAN, View, blocks_of
from headwater.log.live.live_log import LiveLog

SLACK = 2  # a piece may have this many times the requested bytes to reach the end of a block, which is then read once


class Piece(NamedTuple):
    """The framed changes in (after, upto] that pass the filter of a view."""

    data: bytes
    changes: int  # the number of changes
    last: int  # the offset of the last change
    upto: int
    ts: int  # the timestamp of the transaction that ends at `upto`; 0 when none ends there


def read_piece(
    log: LiveLog,
    view: View,
    frame: Frame,
    *,
    after: int,
    upto: int,
    limit: int,
    most: int,
    newer: NewerThanSnapshot | None = None,
) -> Piece:
    """Return the frames of a page like `View.page`; an encoder that writes frames itself goes on to a block's end."""
    encoder = view.encoder
    if isinstance(encoder, WritesFrames) and isinstance(frame, TemplateFrame) and not view.is_whole:
        frames = encoder.frames(frame.enclosing, limit, SLACK * most)
        at, ts = _written(log, view, frames, after, upto, most, newer)
        return Piece(frames.data(), frames.count, frames.last, at, ts)
    page = view.page(log, after=after, upto=upto, limit=limit, most=most, newer=newer)
    data = b"".join([frame(offset, op.word, data) for offset, op, data in page.deliveries])
    last = page.deliveries[-1].offset if page.deliveries else 0
    return Piece(data, len(page.deliveries), last, page.upto, page.ts)


def _written(
    log: LiveLog, view: View, frames: Frames, after: int, upto: int, most: int, newer: NewerThanSnapshot | None
) -> tuple[int, int]:
    """Add changes to `frames`; return the offset reached, and the time of the transaction that ends there, or 0."""
    at, ts = after, 0
    for block in blocks_of(log, after, upto):
        for part in block:
            try:
                ops = view.filter.decide(part.changes, first=part.first, newer=newer)
            except HeadwaterError:
                if at == after:
                    raise
                return at, ts  # the changes before the error are sent first; the next piece raises
            at = part.first + frames.take(part, ops) - 1
            ts = part.ts if part.last and at == part.upto else 0
            if frames.is_full:
                return at, ts
        if frames.size >= most or at - after >= SCAN:
            break
    return at, ts
