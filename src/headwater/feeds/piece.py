"""Piece: a page of the log as the frames of one transport, for streams that catch up."""

from __future__ import annotations

from typing import NamedTuple

from headwater.errors import HeadwaterError
from headwater.feeds.filters import Cut
from headwater.feeds.formats.encoder import Frames, WritesFrames
from headwater.feeds.framing import Enclosed, Frame
from headwater.feeds.reader import SCAN, View, parts_of
from headwater.log.live import LiveLog


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
    """Like `read_page`; written at once where the encoder can."""
    encoder = view.encoder
    if isinstance(encoder, WritesFrames) and isinstance(frame, Enclosed) and not view.is_whole:
        return _written(log, view, encoder.frames(frame.enclosing, limit, most), after, upto, cut)
    page = view.page(log, after=after, upto=upto, limit=limit, most=most, cut=cut)
    data = b"".join([frame(offset, op.word, data) for offset, op, data in page.deliveries])
    last = page.deliveries[-1].offset if page.deliveries else 0
    return Piece(data, len(page.deliveries), last, page.upto, page.ts)


def _written(log: LiveLog, view: View, frames: Frames, after: int, upto: int, cut: Cut | None) -> Piece:
    at, ts = after, 0
    for part in parts_of(log, after, upto):
        try:
            ops = view.filter.decide(part.changes, first=part.first, cut=cut)
        except HeadwaterError:
            if at == after:
                raise
            break  # what comes before goes out first, the next piece raises
        seen = frames.take(part, ops)
        at = part.first + seen - 1
        ts = part.ts if part.last and at == part.upto else 0
        if frames.is_full or at - after >= SCAN:
            break
    return Piece(frames.data(), frames.count, frames.last, at, ts)
