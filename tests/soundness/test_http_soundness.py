"""Random schemas behind the real endpoint: no 304 where the answer would differ, over kills and a second process."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.live_server import Live
from tests.guarantees.server_process import ServerProcess
from tests.soundness import http_differential_checker
from tests.soundness.counters import Counters
from tests.soundness.differential_checker import Unsound, folder
from tests.soundness.grammar import Query
from tests.soundness.guarded_cases import CapturedShop
from tests.soundness.http_differential_checker import HttpTrial
from tests.soundness.random_databases import JSON, Asked, Captured

from headwater.queries.answers import Answering
from headwater.queries.dependencies.guards import GuardState
from headwater.queries.dependencies.instance_versions import InstanceVersions, WatchedInstance

SCHEMAS = 5  # behind one server
SOAK_SCHEMAS = 25
SOAK_SHARDS = 2 * int(os.environ.get("SOAK_SEEDS", "20"))


def run(first: int, schemas: int, counts: Counter[str]) -> None:
    """Try the databases of the seeds from `first` on, in memory if the machine has such a folder."""
    place = folder()
    first = int(os.environ.get("HTTP_SOUNDNESS_SEED", first))
    try:
        http_differential_checker.run(Path(place), first, schemas, counts)
    except Exception as error:
        error.add_note(f"HTTP_SOUNDNESS_SEED={first}")
        raise
    finally:
        shutil.rmtree(place)


def has_teeth(counts: Counter[str]) -> None:
    """Check that tags were sent often, and that many were valid and many not."""
    told = dict(sorted(counts.items()))
    print(told)
    assert counts["refused"] < 0.2 * counts["queries"], told
    assert counts["not modified"] > 0.2 * counts["came back"], told
    assert counts["not modified"] < 0.9 * counts["came back"], told
    assert counts["compared with the file"] > 0.2 * counts["tagged"], told
    assert counts["floors"] and counts["restored"] and counts["without a tag"], told


@pytest.mark.slow
def test_no_304_is_returned_for_a_changed_answer_over_http() -> None:
    counts: Counter[str] = Counter()
    run(0, SCHEMAS, counts)
    has_teeth(counts)


@pytest.mark.slow
def test_no_304_is_returned_for_a_changed_answer_over_http_with_a_fresh_seed(fresh_number: int) -> None:
    run(fresh_number, SCHEMAS, Counter())


@pytest.mark.soak(seconds=25)
@pytest.mark.parametrize("shard", range(SOAK_SHARDS))
def test_no_304_is_returned_for_a_changed_answer_over_http_in_many_schemas(shard: int, fresh_number: int) -> None:
    counts: Counter[str] = Counter()
    run(fresh_number, SOAK_SCHEMAS, counts)
    has_teeth(counts)


# --- histories that part ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("since", [1, 3])
def test_tag_is_invalid_after_the_file_is_restored_and_changed_differently(tmp_path: Path, since: int) -> None:
    _restored(tmp_path, "", ServerProcess.stop, since)


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="tags name offsets that the log has not yet written: up to log.flush_ms of them")
def test_tag_is_invalid_after_a_kill_and_a_restored_file(tmp_path: Path) -> None:
    _restored(tmp_path, "[log]\nflush_ms = 60000\n", ServerProcess.kill, 1)


def _restored(place: Path, settings: str, end: Callable[[ServerProcess], None], changes: int) -> None:
    """Restore an earlier file and make as many other changes, so that the same offsets mean other changes."""
    database, server = Captured("main", place, 0), ServerProcess(place, settings)
    database.attempt("CREATE TABLE t9 (id INTEGER PRIMARY KEY, v INTEGER)", "INSERT INTO t9 VALUES (1, 0)")
    trial, query = HttpTrial(server, [database], 0, Counter()), Query("SELECT v FROM t9", {})
    try:
        server.start()
        asked = Asked(query, trial.rpc("query.prepare", sql=query.sql)["result"], "text/csv")
        database.keep()
        for number in range(1, changes + 1):
            trial.rpc("sql.exec", sql=f"UPDATE t9 SET v = {number}")
        tag = trial.get(database, asked, JSON).headers["etag"]
        end(server)
        database.restore()
        for number in range(1, changes + 1):
            database.attempt(f"UPDATE t9 SET v = {-number}")
        server.start()
        answer = trial.send(asked, JSON, **{"if-none-match": tag})
        assert answer.status_code == 200 and answer.json()["data"]["rows"][0][0]["v"] == -changes
        assert answer.headers["etag"] != tag
    finally:
        trial.http.close()
        server.close()
        database.db.close()


# --- at the same time --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_acknowledged_write_is_missing_from_answers_while_two_processes_write(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path)
    try:
        server.start()
        counters = Counters(lambda: server.url, tmp_path / "main.db")

        def kill_and_start() -> None:
            for _ in range(2):
                counters.until_seen(100)
                server.kill()
                server.start()

        counters.run(writes=250, meanwhile=kill_and_start)
    finally:
        server.close()
    print(dict(counters.counts))
    assert counters.counts["304"] > 50 and counters.counts["200"] > 50, counters.counts


# --- the kit itself ----------------------------------------------------------------------------------------------


def _never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InstanceVersions, "is_current", lambda *_: True)


def _overlooks_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait until the log has everything committed."""

    def advance(versions: InstanceVersions) -> int:
        with versions._lock:
            versions._apply(max(versions._log.latest - 1, versions._applied))
            return versions._applied

    monkeypatch.setattr(InstanceVersions, "advance", advance)


def _forgets_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = InstanceVersions._apply

    def apply(versions: InstanceVersions, upto: int) -> None:
        first, scan = versions._applied, versions._log.scan
        parts = list(scan(after=first, upto=upto)) if upto > first else []
        if any(change.op.word == "delete" for part in parts for change in part.changes):
            versions._applied = upto
        else:
            applied(versions, upto)

    monkeypatch.setattr(InstanceVersions, "_apply", apply)


def _remembers_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat answers to the same request after commits, as long as the schema is the same."""
    monkeypatch.setattr(Answering, "moment", lambda answering: (answering.database.source.read_head().schema,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "first"),
    [(_never_stale, 0), (_overlooks_the_newest, 0), (_forgets_deletes, 0), (_remembers_too_long, 10)],
)
def test_mutant_that_returns_a_wrong_304_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutant(monkeypatch)
    with pytest.raises(Unsound, match="304"):
        for seed in range(first, first + 30):  # `first` is near a seed that catches it
            _in_process(tmp_path / str(seed), seed)


def test_no_304_is_returned_for_a_changed_answer_over_http_in_a_small_run(tmp_path: Path) -> None:
    _in_process(tmp_path, 1_000_000)


def test_guards_allow_only_correct_304_answers_in_a_small_run(tmp_path: Path) -> None:
    assert _in_process(tmp_path, 1_000_000, CapturedShop, 400)["allowed by guards"] > 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak(seconds=25, every_time=True))])
def test_guards_allow_only_correct_304_answers(tmp_path: Path, seed: int) -> None:
    _guarded_well(tmp_path, seed, 1_000)


@pytest.mark.soak(seconds=15)
@pytest.mark.parametrize("shard", range(6))
def test_guards_allow_only_correct_304_answers_for_fresh_seeds(tmp_path: Path, shard: int, fresh_number: int) -> None:
    _guarded_well(tmp_path, fresh_number, 3_000)


def _guarded_well(place: Path, seed: int, operations: int) -> None:
    counts = _in_process(place, seed, CapturedShop, operations)
    print(dict(sorted(counts.items())))
    assert counts["allowed by guards"] > 5 and counts["not modified"] < 0.9 * counts["came back"], counts


def _guards_outlive_their_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    suppresses = GuardState.suppresses

    def suppresses_and_keeps_guards(state: GuardState, *given: Any) -> bool:
        before = state._guards
        is_held_back = suppresses(state, *given)
        state._guards = state._guards or before
        return is_held_back

    monkeypatch.setattr(GuardState, "suppresses", suppresses_and_keeps_guards)


def _tags_reach_behind_the_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    def matters(watched: WatchedInstance, offset: int) -> None:
        watched.last = offset

    monkeypatch.setattr(WatchedInstance, "matters", matters)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [_guards_outlive_their_answer, _tags_reach_behind_the_stretch])
def test_mutant_with_broken_guards_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutant(monkeypatch)
    with pytest.raises(Unsound, match="304"):
        for seed in range(10):
            _in_process(tmp_path / str(seed), seed, CapturedShop, 400)


def _in_process(place: Path, seed: int, make: type[Captured] = Captured, operations: int = 120) -> Counter[str]:
    """Run one schema behind a server in this process; the second connection uses the same SQLite."""
    place.mkdir(exist_ok=True)
    database = make("main", place, seed)
    live = Live(place)
    counts: Counter[str] = Counter()
    trial = HttpTrial(live, [database], seed, counts)
    try:
        trial.run(operations)
        counts["allowed by guards"] = int(live.metric("headwater_query_guard_allowed_total", db="main"))
        return counts
    except Unsound as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        trial.http.close()
        live.stop()
        database.db.close()
