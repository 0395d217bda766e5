"""Backtests: what a subscription would have delivered from the retained log, without creating it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from headwater.feeds.groups.log_reader import View
from headwater.log.live.live_log import LiveLog

SAMPLES = 5
PAGE = 2048
LONGEST_SECONDS = 10.0
BREATH_SECONDS = 0.0005  # a pause between pages, so that threads that serve clients run first


def backtest(
    log: LiveLog, view: View, *, after: int, end: int | None = None, clock: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """Return number, bytes, ops and newest samples of the changes in (after, end] that `view` would deliver.

    After LONGEST_SECONDS the result covers the changes up to `upto_offset` only and is not `complete`.
    """
    end = log.latest if end is None else end
    began = clock()
    matches = size = 0
    ops: dict[str, int] = {}
    samples: list[bytes] = []
    at = after
    while at < end:
        page = view.page(log, after=at, upto=end, limit=PAGE, most=1 << 20)
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
