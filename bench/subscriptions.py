"""Ten and ten thousand subscriptions with different filters: server cost of one committed change."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.generator import Generator, Run, Shot, http_post
from bench.ours import NOTE, RPC, Ours, ours
from bench.sides import folder, versions

FEW, MANY = 10, 10_000
BAR = 1.5  # times the cost with few
PERIOD = 5.0  # of checkpoints: at rest and under load a run sees each stream's once

FILTERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "distinct pk": lambda n: {"pk": [{"t": "i64", "v": n}]},
    "distinct where": lambda n: {"where": f"customer = {n}"},
}


def updates(side: Ours) -> Shot:
    """Return single-row commits on the rows 1 to FEW in turn: each matches one subscription."""
    sql = "UPDATE orders SET note = ? WHERE id = ?"
    return Shot(tuple(side.statement(sql, NOTE, number) for number in range(1, FEW + 1)), 1)


def polls(side: Ours, subscriptions: list[dict[str, Any]]) -> list[bytes]:
    """Return long polls from the head on; the generator replaces the padded offset by the next one."""
    latest = str(side.latest()).ljust(20)
    body = '{"id":1,"method":"cdc.poll","params":{"sub_id":%s,"wait_ms":60000,"from_offset":%s}}'
    return [http_post(side.port, RPC, body % (json.dumps(each["sub_id"]), latest)) for each in subscriptions]


def measure(side: Ours, found: list[dict[str, Any]], generator: Generator, way: str, seconds: float) -> Run:
    """Return one run with a stream, or a waiting poll, for each subscription."""
    polling = way == "poll"
    requests = polls(side, found) if polling else side.streams(found, way)
    return generator.run(side, requests, updates(side), per_mark=1, polling=polling, idle=seconds, seconds=seconds)


def cost(runs: list[Run]) -> float:
    """Return the microseconds of server CPU per change, without the cost of idle open connections."""
    return statistics.median((run.server_s - run.idle_share * run.seconds) / run.published for run in runs) * 1e6


@contextlib.contextmanager
def filtered(place: Path, name: str, count: int) -> Iterator[tuple[Ours, list[dict[str, Any]]]]:
    """Run a server with the FEW rows that will change; yield it and `count` subscriptions."""
    with ours(place / str(count)) as side:
        values = ", ".join(f"({number}, '')" for number in range(1, FEW + 1))
        side.ask("sql.exec", sql=f"INSERT INTO orders(customer, note) VALUES {values}")
        yield side, [side.subscribe(**FILTERS[name](number)) for number in range(1, count + 1)]


def compare(name: str, many: int, repeats: int, seconds: float) -> None:
    """Run a server with few and one with many subscriptions alternately, and print the report."""
    with folder() as place, filtered(place, name, FEW) as small, filtered(place, name, many) as large:
        generator = Generator(place)
        for way in ("sse", "poll"):
            few, more = [], []
            for _ in range(repeats):
                few.append(measure(*small, generator, way, seconds))
                more.append(measure(*large, generator, way, seconds))
            report(f"{name}, {way}", few, many, more)


def report(name: str, few: list[Run], many: int, more: list[Run]) -> None:
    """Print one line with both costs and their ratio."""
    idle = " and ".join(f"{statistics.median(run.idle_share for run in runs):.1%}" for runs in (few, more))
    memory = " and ".join(f"{max(run.kib for run in runs) // 1024}" for runs in (few, more))
    print(
        f"  {name:22} {FEW:,}: {cost(few):>6.0f} us a change   {many:,}: {cost(more):>6.0f} us"
        f"   {cost(more) / cost(few):.2f}x   (idle: {idle} of a core; memory: {memory} MiB)",
        flush=True,
    )


def main(repeats: int = 3, many: int = MANY, seconds: float = PERIOD) -> None:
    """Print costs and ratios."""
    print(versions())
    print(f"subscriptions: server CPU per committed single-row change, {FEW} against {many:,} filters (about {BAR:g}x)")
    for name in FILTERS:
        compare(name, many, repeats, seconds)


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
