"""A bad subscriber costs next to nothing and changes nothing for the others."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.guarantees.bad_subscribers import Pests
from tests.guarantees.feed_journal import CHANGE
from tests.guarantees.feed_oracle import Expected, Spec, Truth
from tests.guarantees.feed_reader import GIVE_UP, Reader
from tests.guarantees.feed_readers import KINDS
from tests.guarantees.feed_validators import Bounded, Isolated, validate
from tests.guarantees.raw_streams import HttpStream, WebSocket
from tests.guarantees.recorder import Recorder
from tests.guarantees.server_process import Asking, ServerProcess
from tests.suite.deadlines import PATIENCE

from headwater.feeds.deliver import hub

# What is shared is paid in both runs: by the first of a kind (filters, reading back), and for the frames that the hub
# keeps, which it does for more than its own FEW streams.
FEW, MORE = hub.FEW + 2, 24
STATEMENTS, ROWS = 30, 400
GROW = (
    f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS}) "
    "INSERT INTO item(name) SELECT printf('%.1000c', 'x') FROM n"
)
SETTINGS = "[feeds]\ncheckpoint_seconds = 0.3\n"
MOST_SECONDS = 8.0  # less than the server waits for a stalled reader: nobody may wait with it
TABLE = "CREATE TABLE item(id INTEGER PRIMARY KEY, name TEXT, mark TEXT)"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[ServerProcess, Asking]]:
    server = ServerProcess(folder, SETTINGS, forked=False)
    try:
        server.start()
        ask = Asking(server)
        ask("sql.exec", sql=TABLE)
        yield server, ask
        ask.close()
        server.stop()
    finally:
        server.close()


@contextlib.contextmanager
def reading(server: ServerProcess, ask: Asking, transports: list[str]) -> Iterator[list[Reader]]:
    """Yield good readers; at the end let them read to the end."""
    specs = [Spec(transport=transport, tables=("item",), format="plain_json") for transport in transports]
    readers = [KINDS[spec.transport](server, spec, random.Random(7), f"good{n}") for n, spec in enumerate(specs)]
    threads = [threading.Thread(target=reader.run) for reader in readers]
    for reader, thread in zip(readers, threads, strict=True):
        reader.calm()
        thread.start()
    goal = GIVE_UP
    try:
        yield readers
        server.wait_caught_up()
        goal = int(ask("stats.snapshot")["cdc"]["latest_offset"])
    finally:
        late = threading.Timer(PATIENCE, lambda: [reader.finish(GIVE_UP) for reader in readers])
        late.start()
        for reader in readers:
            reader.finish(goal)
        for thread in threads:
            thread.join()
        late.cancel()


def stalled(server: ServerProcess, ask: Asking, number: int) -> list[HttpStream | WebSocket]:
    """Open streams of all transports and different options that request everything and are never read."""
    found: list[HttpStream | WebSocket] = []
    for n in range(number):
        include = {"before": n % 2 == 0, "after": True}
        sub = ask("cdc.subscribe_table", table="item", include=include, where=f"id > {n}", start="earliest")
        match n % 3:
            case 0:
                found.append(HttpStream(server.url, sub["sse_url"], {}, sse=True))
            case 1:
                found.append(WebSocket(server.url, sub["ws_url"], {}))
            case _:
                path = f"/api/v1/changes/main/item?where=id%3E{n}&from_offset=0"
                found.append(HttpStream(server.url, path, {"Accept": "application/x-ndjson"}, sse=False))
    return found


def growth(folder: Path, number: int) -> int:
    """Return how many bytes the server's memory grows by under load with `number` stalled readers."""
    with serving(folder) as (server, ask):
        before = memory(server.pid)
        held = stalled(server, ask, number)
        with reading(server, ask, ["sse"]) as (good,):
            for _ in range(STATEMENTS):
                ask("sql.exec", sql=GROW)
        after = memory(server.pid)
        assert sum(entry.kind == CHANGE for entry in good.journal) >= STATEMENTS * ROWS
        for stream in held:
            stream.close()
        return after - before


def memory(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS:"))


@pytest.mark.slow
def test_stalled_reader_uses_at_most_one_mebibyte(tmp_path: Path) -> None:
    bounded = Bounded()
    few, more = growth(tmp_path / "few", FEW), growth(tmp_path / "more", FEW + MORE)
    print(f"grew by {few >> 20} MiB with {FEW} stalled readers, by {more >> 20} MiB with {MORE} more")
    bounded.check(without=few, stalled=more, readers=MORE)
    assert not bounded.failures, bounded.failures


@pytest.mark.slow
def test_misbehaving_subscribers_do_not_affect_correct_readers(tmp_path: Path) -> None:
    isolated, sent = Isolated(), {}
    recorder = Recorder(tmp_path / "main.log.db")
    with serving(tmp_path) as (server, ask):
        pests = Pests(server, random.Random(7), connects_per_second=100)
        with reading(server, ask, ["sse", "websocket", "long_poll", "ndjson"]) as readers:
            pests.start()
            try:
                end = time.monotonic() + PATIENCE
                for n in itertools.count():
                    if n >= 150 and pests.counts["connects"] > 100 and pests.counts["refused frames"] > 5:
                        break
                    assert time.monotonic() < end, pests.counts
                    ask("sql.exec", sql="INSERT INTO item(name, mark) VALUES ('x', ?)", args=[f"m{n}"])
                    sent[f"m{n}"] = time.monotonic()
                    time.sleep(0.02)
            finally:
                pests.stop()
    recorder.read()
    truth = Truth(recorder.parts)
    for reader in readers:
        seen = {entry.body["after"]["mark"]: entry.time for entry in reader.journal if "after" in (entry.body or ())}
        isolated.check(reader.spec.transport, sent, seen, most=MOST_SECONDS)
        streams = reader.spec.transport != "long_poll"
        broken = validate(reader.journal, Expected(truth, reader.spec), set(), reader.goal, streams=streams)
        assert not broken + reader.defects, broken + reader.defects
    assert not isolated.failures, isolated.failures
    assert not pests.counts["not refused"], pests.counts
