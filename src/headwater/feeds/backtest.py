"""Backtest: what a subscription would have delivered, from the log that is still there, without making it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from headwater.feeds.groups.log_reader import View, read_page
from headwater.log.live.live_log import LiveLog

SAMPLES = 5
PAGE = 2048
LONGEST_SECONDS = 10.0
BREATH_SECONDS = 0.0005  # between pages: whoever serves others goes first


def backtest(
    log: LiveLog, view: View, *, after: int, end: int | None = None, clock: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """Matches and bytes of everything after `after` up to `end` or now, by op, with the newest samples.

    When it takes too long it is not `complete`, and tells of what lies up to `upto_offset`.
    """
    end = log.latest if end is None else end
    began = clock()
    matches = size = 0
    ops: dict[str, int] = {}
    samples: list[bytes] = []
    at = after
    while at < end:
        page = read_page(log, view, after=at, upto=end, limit=PAGE, most=1 << 20)
        if page.upto == at:
            break
        at = page.upto
        matches += len(page.deliveries)
        size += page.size
        for delivery in page.deliveries:
            ops[delivery.op.word] = ops.get(delivery.op.word, 0) + 1
        samples = [*samples, *(delivery.data for delivery in page.deliveries)][-SAMPLES:]
        if clock() - began >= LONGEST_SECONDS:
            break
        time.sleep(BREATH_SECONDS)
    return {
        "matches": matches,
        "bytes": size,
        "samples": [msgspec.Raw(data) for data in samples],
        "ops": ops,
        "scanned": max(at - after, 0),
        "from_offset": after,
        "upto_offset": at,
        "complete": at >= end,
    }
