"""Readers that stop reading: memory of the server for each, and whether each receives what it missed."""

from __future__ import annotations

import sys

from bench.generator import Generator
from bench.ours import ours
from bench.sides import folder, versions

READERS, STALLED, WIDTH = 20, 10, 64
BAR_KIB = 1024  # for each stalled reader


def measure(transport: str, seconds: float) -> None:
    """Let all readers read, half of them stall and resume; print the server's memory in each phase."""
    with folder() as place, ours(place / "data") as side:
        size, streams = side.size(), side.subscribers(transport, READERS)
        run = Generator(place).run(side, streams, side.shot(WIDTH), stalled=STALLED, seconds=seconds, warm=seconds)
    each = (run.stalled_kib - run.reading_kib) / STALLED
    print(
        f"  {transport:4} all reading {run.reading_kib:,} KiB · {STALLED} stalled {run.stalled_kib:,} KiB · read on "
        f"{run.resumed_kib:,} KiB · {each:,.0f} KiB per stalled reader, each {run.missed:,} changes"
        f" ({run.missed * size / 2**20:.0f} MiB) behind, all delivered {run.catch_up_s:.1f} s after reading on"
    )


def main(seconds: float = 5.0) -> None:
    """Print the memory of the server in the three phases."""
    print(versions())
    print(
        f"stalled: {STALLED} of {READERS} readers stop reading for {seconds:g} s (bar: {BAR_KIB} KiB for each of them)"
    )
    for transport in ("sse", "ws"):
        measure(transport, seconds)


if __name__ == "__main__":
    main(*(float(each) for each in sys.argv[1:]))
