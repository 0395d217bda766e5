"""One transaction of 500,000 rows: from its commit to its first and its last row in our durable log, and our memory,
against pg_recvlogical. `python -m bench.pg_transaction [rows [repeats]]`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from pathlib import Path

from bench.pg import INSERT, SLOT, Database, Ours, Reading, database
from bench.sides import versions
from headwater.sources.postgres.capture.decode.row_decoder import twin

ROWS = 500_000


class Load:
    """Commits transactions of `rows` inserts."""

    def __init__(self, base: Database, rows: int) -> None:
        self._base, self._rows, self._next = base, rows, 1

    def run(self) -> float:
        """Commit one transaction; return when, by the monotonic clock."""
        first, self._next = self._next, self._next + self._rows
        self._base.db.execute(INSERT.encode(), (first, self._next - 1))
        return time.monotonic()


def recvlogical(base: Database, load: Load) -> Reading:
    """Time pg_recvlogical until a message written after the commit arrives, so that it has read everything."""
    with base.slot("peer") as slot:
        child = subprocess.Popen(base.recvlogical_command(slot), stdout=subprocess.PIPE)
        assert child.stdout
        base.until_active(slot)
        committed = load.run()
        mark = uuid.uuid4().hex.encode()
        base.one("SELECT pg_logical_emit_message(false, 'mark', %s)", mark.decode())
        kept = b""
        while data := child.stdout.read1(1 << 20):
            if mark in kept + data:
                break
            kept = data[-len(mark) :]
        last = time.monotonic() - committed
        child.terminate()
        child.communicate()
        return Reading(last, 0, 0)


def ours(base: Database, data: Path, load: Load, rows: int) -> Reading:
    """Time our source and log, which read while the transaction is written."""
    with Ours(base, data).started(rows) as child:
        base.until_active(SLOT)
        committed = load.run()
        found = child.finish()
        return Reading(found["ended_at"] - committed, found["cpu"], found["mib"], first=found["first_at"] - committed)


def main(rows: int = ROWS, repeats: int = 3) -> None:
    """Run the sides alternately and print medians."""
    with database(logical_decoding_work_mem="64MB") as (base, place):
        print(f"{versions()} · {base.version()} · decoder {twin().name}")
        print(f"pg_transaction: one of {rows:,} rows, from its commit on")
        load = Load(base, rows)
        runs: dict[str, list[Reading]] = defaultdict(list)
        for turn in range(repeats):
            data = place / f"data{turn}"
            base.attach(data)
            runs["pg_recvlogical"].append(recvlogical(base, load))
            base.attach(data.with_name(f"again{turn}"))
            runs["ours"].append(ours(base, data.with_name(f"again{turn}"), load, rows))
        floor = statistics.median(run.seconds for run in runs["pg_recvlogical"])
        last, first, mib = (statistics.median(values) for values in zip(*map(_figures, runs["ours"]), strict=True))
        print(f"  {'pg_recvlogical':16} last row {floor:.2f} s")
        print(f"  {'ours, durable':16} last row {last:.2f} s ({last / floor:.2f}x), first {first:.2f} s, {mib:.0f} MiB")


def _figures(run: Reading) -> tuple[float, float, float]:
    return run.seconds, run.more["first"], run.mib


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
