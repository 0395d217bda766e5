"""A puller of ranges ends with exactly the table, despite splits, merges and kills of the server."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.guarantees.range_puller import RangePuller
from tests.guarantees.server_process import Asking, ServerProcess

from headwater.model.keys.key import encode_key

ROWS = 400


class Ground:
    """A server that can be killed and restarted, and calls to it."""

    def __init__(self, folder: Path) -> None:
        self.server = ServerProcess(folder, "[log]\nflush_ms = 5\n[pull]\ntarget_bytes = 4000\n")
        self.server.start()
        self.ask = Asking(self.server)
        self._channel: tuple[str, grpc.Channel] | None = None

    def channel(self) -> grpc.Channel:
        if self._channel is None or self._channel[0] != self.server.grpc:
            self._close()
            self._channel = self.server.grpc, grpc.insecure_channel(self.server.grpc)
        return self._channel[1]

    def kill(self) -> None:
        self.server.kill()
        self.server.start()

    def sql(self, text: str) -> Any:
        return self.ask("sql.exec", sql=text)

    def table(self) -> dict[bytes, Any]:
        found = self.ask("sql.exec", sql="SELECT k, v FROM t", result_format="objects_json")
        rows = found["result"]["data"]["rows"]
        plain = [{name: lit.get("v") for name, lit in row.items()} for row in rows]
        return {encode_key((row["k"],)): json.loads(json.dumps(row)) for row in plain}

    def ranges(self) -> list[dict[str, Any]]:
        return list(self.ask("pull.ranges", table="t")["ranges"])

    def latest(self) -> int:
        return int(self.ask("pull.describe", table="t")["latest"])

    def _close(self) -> None:
        if self._channel is not None:
            self._channel[1].close()
            self._channel = None

    def close(self) -> None:
        self._close()
        self.ask.close()
        self.server.close()


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    made = Ground(tmp_path)
    made.sql("CREATE TABLE t(k INTEGER PRIMARY KEY, v TEXT)")
    made.sql(
        f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS})"
        " INSERT INTO t SELECT i * 10, hex(zeroblob(20)) || i FROM n"
    )
    yield made
    made.close()


def write(ground: Ground, random: random.Random) -> None:
    """Run a random transaction: inserts, updates, deletes or moved keys."""
    low = random.randrange(0, ROWS * 10)
    statements = [
        f"INSERT OR REPLACE INTO t VALUES ({random.randrange(ROWS * 12)}, 'new {random.random()}')",
        f"UPDATE t SET v = 'set {random.random()}' WHERE k BETWEEN {low} AND {low + 60}",
        f"DELETE FROM t WHERE k BETWEEN {low} AND {low + 20}",
        f"UPDATE OR IGNORE t SET k = k + {random.randrange(-2000, 2000)} WHERE k BETWEEN {low} AND {low + 40}",
    ]
    ground.sql(random.choice(statements))


def cut(ground: Ground, random: random.Random) -> None:
    """Split a range, or merge two."""
    ranges = ground.ranges()
    place = random.randrange(len(ranges))
    if random.random() < 0.5 and place + 1 < len(ranges):
        pair = [{name: one[name] for name in ("id", "epoch")} for one in ranges[place : place + 2]]
        ground.ask("pull.merge", table="t", ranges=pair)
    else:
        one = ranges[place]
        low = 0 if not one["start"] else int(place * 10)
        at = encode_key((low * 10 + random.randrange(1, ROWS * 10),))
        if one["start"] < at.hex() and ("end" not in one or at.hex() < one["end"]):
            ground.ask("pull.split", table="t", range=one["id"], epoch=one["epoch"], at=at.hex())


@pytest.mark.parametrize("seed", ["ranges", "puller"])
def test_range_puller_ends_with_exactly_the_table(ground: Ground, seed: str) -> None:
    pull_through_trouble(ground, seed)


@pytest.mark.soak(seconds=20)
@pytest.mark.parametrize("place", range(int(os.environ.get("SOAK_SEEDS", "20"))))
def test_range_puller_ends_with_exactly_the_table_for_fresh_seeds(ground: Ground, place: int, fresh_seed: str) -> None:
    pull_through_trouble(ground, fresh_seed)


def pull_through_trouble(ground: Ground, seed: str) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    puller = RangePuller(ground.channel, "t", limit=7)
    puller.begin()
    assert len(puller.sections) > 2
    for turn in range(40):
        for _ in range(chance.randrange(3)):
            write(ground, chance)
        if turn % 4 == 1:
            cut(ground, chance)
        if turn in (9, 25):
            ground.kill()
        puller.round()
    puller.follow(ground.latest())
    assert puller.rows == ground.table()
    assert puller.stale and puller.changes and not puller.renewed
    assert not puller.open, "every transaction ended"
