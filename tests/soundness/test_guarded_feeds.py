"""Guards on live streams: without an invalidation the answer is unchanged, and a replay of the log has all
invalidations.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.conformance.live_server import Live
from tests.soundness.differential_checker import Unsound
from tests.soundness.guarded_cases import GuardedWorld

from headwater.feeds.deliver import hub

QUERIES = 8


class Follower:
    """One query, its stream, and the answers read in between."""

    def __init__(self, live: Live, world: GuardedWorld) -> None:
        self.live, query = live, world.query()
        made = live.ok("query.prepare", sql=query.sql)
        self.sql, self.id = query.sql, made["query_id"]
        self.args = [query.args[name] for name in made["parameters"]]
        self.first = self.head()
        self.stream = live.get(self.url)
        self.answers: list[tuple[int, Any]] = []

    @property
    def url(self) -> str:
        return f"/api/v1/q/{self.id}/events?args={quote(json.dumps(self.args))}"

    def head(self) -> int:
        return self.live.app.database("main").source.head()

    def ask(self) -> None:
        """Read the answer at the head; nothing writes meanwhile."""
        answer = self.live.ok("query.execute_prepared", query_id=self.id, args=self.args)
        self.answers.append((self.head(), answer["data"]))

    def invalidations(self, stream: Any, upto: int) -> dict[int, str]:
        """Return the tags of the invalidations up to `upto`, by offset; read until a later one, which always comes."""
        found: dict[int, str] = {}
        while max(found, default=0) <= upto:
            frame = stream.next("invalidate")
            found[int(frame.id)] = frame.data["etag"]
        return {offset: etag for offset, etag in found.items() if offset <= upto}

    def check(self, upto: int) -> int:
        """Return how many invalidations guards suppressed; fail if one of them was needed."""
        told = self.invalidations(self.stream, upto)
        for (since, before), (until, now) in zip(self.answers, self.answers[1:], strict=False):
            if before != now and not any(since < offset <= until for offset in told):
                raise Unsound(f"silence in ({since}, {until}]\n{self.sql} {self.args}\nwas {before}\nis  {now}")
        replayed = {offset: etag for offset, etag in self.replayed().items() if offset <= upto}
        assert {offset: end(etag) for offset, etag in told.items()}.items() <= replayed.items()
        return len(replayed) - len(told)

    def replayed(self) -> dict[int, str]:
        """Return the invalidations read from the log, where guards are not used."""
        named = {"query_id": self.id, "args": self.args, "format": "plain_json", "start": {"offset": self.first}}
        events = self.live.changes(self.live.ok("cdc.subscribe_query", **named), limit=1000)
        return {event["offset"]: end(event["etag"]) for event in events}


def end(etag: str) -> str:
    """Return the offset in a tag; the rest depends on the current schema."""
    return etag.rpartition(".")[2]


def follow(live: Live, seed: int, steps: int) -> int:
    """Return how many invalidations were suppressed in all."""
    world, dice = GuardedWorld(seed), random.Random(seed)
    for sql in world.setup:
        live.sql(sql)
    followers = [Follower(live, world) for _ in range(QUERIES)]
    for _ in range(steps):
        for one in followers:
            if dice.random() < 0.7:
                one.ask()
        statements = world.step().statements
        live.together(*statements) if dice.random() < 0.5 else [live.sql(sql) for sql in statements]
    for one in followers:
        one.ask()
    upto = followers[0].head()
    for table in ("orders", "customers", "lines"):
        live.sql(f"ALTER TABLE {table} ADD COLUMN the_end TEXT")
    return sum(one.check(upto) for one in followers)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_answer_is_unchanged_while_a_guarded_stream_is_silent(tmp_path: Path, seed: int) -> None:
    live = Live(tmp_path)
    try:
        held_back = follow(live, seed, 60)
    finally:
        live.stop()
    print(f"\n{held_back} were held back")
    assert held_back > 10


@pytest.mark.slow
def test_missing_invalidation_on_a_guarded_stream_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "steady_at", lambda questions, upto: dict.fromkeys(questions, 0))
    live = Live(tmp_path)
    try:
        with pytest.raises(Unsound, match="silence in"):
            follow(live, 0, 60)
    finally:
        live.stop()
