"""Piece: a page of the log as the frames of one transport, for streams that catch up."""

from __future__ import annotations

from typing import NamedTuple

from headwater.errors import HeadwaterError
from headwater.feeds.filters.filter import Cut
from headwater.feeds.formats.encoder import Frames, WritesFrames
from headwater.feeds.formats.frame import Enclosed, Frame
from headwater.feeds.groups.log_reader import SCAN, View, blocks_of
from headwater.log.live.live_log import LiveLog

SLACK = 2  # times the bytes asked for may be written where a block ends with them: it need not be read again


class Piece(NamedTuple):
    """Everything in (after, upto] that passes the filter of a view, framed."""

    data: bytes
    changes: int  # how many
    last: int  # the offset of the last of them
    upto: int
    ts: int  # of the transaction that ends at `upto`; 0 when one does not end there


def read_piece(
    log: LiveLog, view: View, frame: Frame, *, after: int, upto: int, limit: int, most: int, cut: Cut | None = None
) -> Piece:
    """Like `read_page`; written at once where the encoder can, and then a piece ends where a block does, if it can."""
    encoder = view.encoder
    if isinstance(encoder, WritesFrames) and isinstance(frame, Enclosed) and not view.is_whole:
        frames = encoder.frames(frame.enclosing, limit, SLACK * most)
        at, ts = _written(log, view, frames, after, upto, most, cut)
        return Piece(frames.data(), frames.count, frames.last, at, ts)
    page = view.page(log, after=after, upto=upto, limit=limit, most=most, cut=cut)
    data = b"".join([frame(offset, op.word, data) for offset, op, data in page.deliveries])
    last = page.deliveries[-1].offset if page.deliveries else 0
    return Piece(data, len(page.deliveries), last, page.upto, page.ts)


def _written(
    log: LiveLog, view: View, frames: Frames, after: int, upto: int, most: int, cut: Cut | None
) -> tuple[int, int]:
    """How far it came, and the time of the transaction that ends there."""
    at, ts = after, 0
    for block in blocks_of(log, after, upto):
        for part in block:
            try:
                ops = view.filter.decide(part.changes, first=part.first, cut=cut)
            except HeadwaterError:
                if at == after:
                    raise
                return at, ts  # what comes before goes out first, the next piece raises
            at = part.first + frames.take(part, ops) - 1
            ts = part.ts if part.last and at == part.upto else 0
            if frames.is_full:
                return at, ts
        if frames.size >= most or at - after >= SCAN:
            break
    return at, ts
