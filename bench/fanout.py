"""Fan-out: server CPU per delivery of SSE and WebSocket streams, against nchan, with Redis as the floor."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from bench.generator import Generator, Missing, Run, Side
from bench.ours import ours
from bench.peers import nchan, redis
from bench.sides import folder, versions

COUNTS = (100, 1000)
WIDTHS = {1: "single", 64: "batched"}
BARS = {1: 2.0, 64: 0.3}  # of nchan's CPU per delivery


class Cell(NamedTuple):
    """One combination to measure; with 0 subscribers it measures publishing alone."""

    name: str
    transport: str
    subscribers: int
    width: int


@contextlib.contextmanager
def all_sides(place: Path) -> Iterator[dict[str, Side]]:
    """Yield our server and every installed peer by name; their events have the same size."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(ours(place / "data"))
        sides: dict[str, Side] = {"ours": first}
        size = first.size()
        print(f"  one change is {size} bytes of JSON; the peers publish texts of that size")
        peers: dict[str, Callable[[Path, int], AbstractContextManager[Side]]] = {"nchan": nchan, "Redis": redis}
        for name, peer in peers.items():
            (place / name).mkdir()
            try:
                sides[name] = stack.enter_context(peer(place / name, size))
            except Missing as missing:
                print(f"  without {name}: {missing}")
        yield sides


def cells(sides: dict[str, Side]) -> list[Cell]:
    """Return every combination of the installed sides, ordered so that sides alternate."""
    streams = [("ours", "sse"), ("nchan", "sse"), ("ours", "ws"), ("nchan", "ws"), ("Redis", "")]
    publishing = [("ours", "sse"), ("nchan", "sse"), ("Redis", "")]
    found = [Cell(*side, 0, width) for width in WIDTHS for side in publishing]
    found += [Cell(*side, count, width) for count in COUNTS for width in WIDTHS for side in streams]
    return [cell for cell in found if cell.name in sides]


def measure(generator: Generator, sides: dict[str, Side], repeats: int, seconds: float) -> dict[Cell, list[Run]]:
    """Return all runs of each cell; every round runs all cells once."""
    runs = defaultdict(list)
    for _ in range(repeats):
        for cell in cells(sides):
            side = sides[cell.name]
            streams = side.subscribers(cell.transport, cell.subscribers)
            runs[cell].append(generator.run(side, streams, side.shot(cell.width), seconds=seconds))
    return runs


class Costs:
    """Microseconds of server CPU: as measured, and without the cost of the same publishing with no subscribers."""

    def __init__(self, runs: dict[Cell, list[Run]]) -> None:
        self._runs = runs

    def publishing(self, cell: Cell) -> float:
        """Return the cost per change without subscribers."""
        alone = next(other for other in self._runs if other[0] == cell.name and other[2:] == (0, cell.width))
        return statistics.median(run.server_s / run.published for run in self._runs[alone]) * 1e6

    def raw(self, cell: Cell) -> float:
        """Return the cost per delivery, publishing included."""
        return statistics.median(run.server_s / run.deliveries for run in self._runs[cell]) * 1e6

    def fan_out(self, cell: Cell) -> float:
        """Return the cost per delivery without the cost of publishing."""
        return self.raw(cell) - self.publishing(cell) / cell.subscribers

    def ratio(self, cell: Cell, peer: Cell) -> str:
        """Return our cost as a multiple of a peer's, as text: without publishing, and (raw) with it."""
        fan_out, raw = self.fan_out(cell) / self.fan_out(peer), self.raw(cell) / self.raw(peer)
        return f"{peer.name} {fan_out:.2f}x ({raw:.2f}x)"

    def line(self, cell: Cell) -> str:
        """Return the figures of one cell as a line of text."""
        runs = self._runs[cell]
        rate = statistics.median(run.deliveries / run.seconds for run in runs)
        client = statistics.median(run.client_s / run.deliveries for run in runs) * 1e6
        busy = statistics.median(run.client_s / run.seconds for run in runs)
        flag = "  GENERATOR AT ITS LIMIT" if busy > 0.95 else ""
        return (
            f"  {cell.subscribers:>5} {WIDTHS[cell.width]:8} {cell.name + ' ' + cell.transport:10}"
            f" {self.fan_out(cell):>7.2f} us {self.raw(cell):>7.2f} us   {rate:>10,.0f}/s"
            f"   generator {client:.2f} us, {busy:.0%} of a core{flag}"
        )


def report(runs: dict[Cell, list[Run]]) -> None:
    """Print the cells, then the ratios."""
    costs = Costs(runs)
    print("  publishing alone, us of server CPU per change (for us: a durable commit over RPC):")
    for cell in runs:
        if not cell.subscribers:
            print(f"        {WIDTHS[cell.width]:8} {cell.name:10} {costs.publishing(cell):>7.2f} us")
    print("  subscribers, window, side; us of server CPU per delivery: fan-out alone, with publishing; deliveries/s")
    for cell in runs:
        if cell.subscribers:
            print(costs.line(cell))
    print(f"  ratios of fan-out alone (with publishing); bars against nchan: {BARS[1]} single, {BARS[64]} batched")
    for cell in runs:
        if cell.subscribers and cell.name == "ours":
            peers = [cell._replace(name="nchan"), cell._replace(name="Redis", transport="")]
            ratios = "   ".join(costs.ratio(cell, peer) for peer in peers if peer in runs)
            print(f"  {cell.subscribers:>5} {WIDTHS[cell.width]:8} {cell.transport:4} {ratios}")


def main(repeats: int = 3, seconds: float = 1.5) -> None:
    """Print costs and ratios."""
    print(versions())
    print(
        "fan-out: closed loop, the next publication when all subscribers have the last (batched: 64 at a time: for us"
    )
    print("one commit of 64 rows by one statement, for the peers 64 pipelined publications)")
    with folder() as place, all_sides(place) as sides:
        report(measure(Generator(place), sides, repeats, seconds))


if __name__ == "__main__":
    main(*(int(sys.argv[1]),) if len(sys.argv) > 1 else ())
