"""The SQL sink on real PostgreSQL, MariaDB and SQLite: rows and offset are one commit, whatever is killed."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import strategies as st
from sqlalchemy import event
from sqlalchemy.dialects import mysql, postgresql, sqlite
from tests.pipeline.sinks.local_frames import LocalFrame, run
from tests.pipeline.sinks.sql_sink_steps import (
    SPANS,
    TABLE,
    LocalSink,
    Rows,
    Story,
    change,
    changes_frame,
    plan,
    rows_frame,
    update,
)
from tests.suite.deadlines import PATIENCE
from tests.suite.examples import examples

from headwater.errors import ConfigError, PipelineError, SinkFenced, SinkGap, SinkUnfit, Unavailable
from headwater.model.table import Column, Table
from headwater.pipeline.sinks.registry import open_sink
from headwater.pipeline.sinks.sink import HISTORY, UPSERT, Part, Step
from headwater.pipeline.sinks.sql.dialects import Dialect, fields_of
from headwater.pipeline.sinks.sql.rows import RowReader
from headwater.pipeline.sinks.sql.sql import SqlSink, open_sql
from headwater.pipeline.sinks.sql.target import Target
from headwater.pipeline.transform.schema import TEXT as TEXT_FORM
from headwater.pipeline.transform.schema import TYPED, rows_schema

pytest_plugins = ("tests.pipeline.servers",)

EMPTY = msgspec.structs.replace(plan(), spans=())  # nothing to load: steps may come at once
ENGINES = ("postgresql", "mysql", "sqlite")
NO_SHRINKING = (Phase.explicit, Phase.generate)  # a server answers too slowly for it


@pytest.fixture(params=ENGINES)
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(engine_name: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return an empty database; each test runs with every kind."""
    if engine_name == "sqlite":
        return f"sqlite:///{tmp_path}/lake.db"
    return str(request.getfixturevalue({"postgresql": "postgres_database", "mysql": "mariadb_database"}[engine_name]))


@pytest.fixture
def story(url: str) -> Iterator[Story]:
    made = Story(url)
    yield made
    made.sink.close()


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    engine = sa.create_engine(url)
    try:
        with engine.begin() as connection:
            found = connection.exec_driver_sql(statement)
            return [tuple(row) for row in found] if found.returns_rows else []
    finally:
        engine.dispose()


def stages(url: str) -> list[str]:
    engine = sa.create_engine(url)
    try:
        return [name for name in sa.inspect(engine).get_table_names() if name.startswith("headwater_stage")]
    finally:
        engine.dispose()


# Rows


def test_sql_snapshot_and_changes_produce_the_current_table(story: Story) -> None:
    assert story.sink.state() is None
    story.begin()
    story.load()
    state = story.sink.state()
    assert state and (state.offset, state.loaded) == (100, {SPANS[0]: 101, SPANS[1]: 102})
    assert story.stored_rows() == Story.LOADED
    story.apply()
    state = story.sink.state()
    assert state and (state.offset, state.loaded, state.plan) == (110, {}, plan())
    assert story.stored_rows() == Story.AFTER


def test_loads_and_steps_already_applied_are_ignored_by_the_sql_sink(story: Story) -> None:
    story.begin()
    story.load()
    story.sink.load(rows_frame({1: "other"}, {}), plan(), [Part(SPANS[0], 105), Part(SPANS[1], 105)])
    assert story.stored_rows() == Story.LOADED
    story.apply()
    story.apply()
    assert story.stored_rows() == Story.AFTER


def test_part_without_rows_is_marked_as_loaded(story: Story) -> None:
    story.begin()
    story.sink.load(rows_frame({}, {10: "ten"}), plan(), [Part(SPANS[0], 101), Part(SPANS[1], 101)])
    state = story.sink.state()
    assert state and state.missing == [] and story.stored_rows() == {10: "ten"}


def test_load_offset_of_a_part_is_stored_until_the_table_reaches_it(story: Story) -> None:
    story.begin()
    story.load()
    story.sink.apply(changes_frame([]), Step("p1", "g", 100, 101), TABLE)
    state = story.sink.state()
    assert state and (state.offset, state.loaded) == (101, {SPANS[1]: 102})


def test_repair_step_fixes_rows_and_keeps_the_offset(story: Story) -> None:
    story.begin()
    story.load()
    story.apply()
    query(story.url, "UPDATE target SET name = 'bad' WHERE id = 1")
    mended = [change("delete", 2, "one", 110), change("insert", 1, "two", 110)]
    story.sink.apply(changes_frame(mended), Step("p1", "g", 110, 110, repair=True), TABLE)
    state = story.sink.state()
    assert state and state.offset == 110
    assert story.stored_rows() == {key: name for key, name in Story.AFTER.items() if key != 2}
    with pytest.raises(SinkFenced):
        story.sink.apply(changes_frame(mended), Step("p1", "g", 109, 109, repair=True), TABLE)


def left_out(key: int, offset: int, misfit: str = '{"name":{"t":"unavailable"}}') -> list[dict[str, Any]]:
    """Return an update that omits the value of `name`."""
    return [{**each, "name": None, "_misfit": misfit} for each in update((key, ""), (key, ""), offset)]


def test_value_omitted_by_an_update_is_kept(story: Story) -> None:
    story.begin()
    story.load()
    other = '{"name":{"t":"unavailable"},"other":{"t":"i64","v":1}}'
    changes = [*left_out(1, 103), *left_out(10, 104, other), change("delete", 2, "two", 105)]
    story.sink.apply(changes_frame([*changes, change("insert", 3, "three", 106)]), Step("p1", "g", 100, 106), TABLE)
    assert story.stored_rows() == {1: "one", 3: "three", 10: "ten", 11: "eleven"}
    told = query(story.url, "SELECT id, _misfit FROM target WHERE _misfit IS NOT NULL")
    assert told == [(10, '{"other":{"t":"i64","v":1}}')]
    with pytest.raises(PipelineError) as failed:  # of a row that is not there nothing can stay
        story.sink.apply(changes_frame(left_out(77, 107)), Step("p1", "g", 106, 107), TABLE)
    assert failed.value.extra["resnapshot_reason"] == "values_unavailable"
    state = story.sink.state()
    assert state and state.offset == 106 and 77 not in story.stored_rows()


def test_duplicate_value_under_a_unique_index_of_the_target_is_refused(story: Story, engine_name: str) -> None:
    """Row 1 releases the value and an earlier row takes it: the merge confuses neither."""
    story.begin()
    story.load()
    if engine_name == "mysql":
        query(story.url, "ALTER TABLE target MODIFY name VARCHAR(100)")
    query(story.url, "CREATE UNIQUE INDEX other ON target (name)")
    zero = update((0, "zero"), (0, "one"), 104)
    changes = [change("insert", 0, "zero", 102), *update((1, "one"), (1, "uno"), 103), *zero]
    if engine_name == "mysql":
        story.sink.apply(changes_frame(changes), Step("p1", "g", 100, 104), TABLE)
        assert story.stored_rows() == {**Story.LOADED, 1: "uno", 0: "one"}
    before, state = story.stored_rows(), story.sink.state()
    assert state
    twice = [change("insert", 5, "ten", 105), *update((11, "eleven"), (11, "ten"), 106)]
    for row in (twice[:1], twice[1:]):  # in the source there is no such index: it is told, and nothing is written
        with pytest.raises(SinkUnfit):
            story.sink.apply(changes_frame(row), Step("p1", "g", state.offset, 106), TABLE)
        assert story.stored_rows() == before and story.sink.state() == state


KEYS, NAMES = st.integers(0, 2), st.sampled_from(["a", "b"])
OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "delete", "move"]), KEYS, KEYS, NAMES), min_size=8, max_size=16)


def log_of(operations: list[tuple[str, int, int, str]]) -> tuple[list[list[dict[str, Any]]], list[Rows]]:
    """Return the changes at each offset after 100, and the rows after each."""
    rows: Rows = {}
    log, held = [], [dict(rows)]
    for operation, key, other, name in operations:
        offset = 101 + len(log)
        if operation == "put":
            is_new = key not in rows
            old = rows.get(key, "")
            log.append([change("insert", key, name, offset)] if is_new else update((key, old), (key, name), offset))
            rows[key] = name
        elif operation == "delete" and key in rows:
            log.append([change("delete", key, rows.pop(key), offset)])
        elif operation == "move" and key in rows and other not in rows:
            log.append(update((key, rows[key]), (other, rows[key]), offset))
            rows[other] = rows.pop(key)
        else:
            continue
        held.append(dict(rows))
    return log, held


@examples(12, phases=NO_SHRINKING, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPERATIONS, st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=5))
def test_overlapping_and_repeated_steps_end_with_the_rows_of_the_log(
    story: Story, operations: list[tuple[str, int, int, str]], steps: list[tuple[int, int]]
) -> None:
    log, held = log_of(operations)
    story.sink.begin(EMPTY)
    at = 0
    for after, upto in [*steps, (0, len(log))]:
        after, upto = min(after, len(log)), min(upto, len(log))
        frame = changes_frame(each for place in range(after, upto) for each in log[place])
        step = Step("p1", "g", 100 + after, 100 + upto)
        if after > at:
            with pytest.raises(SinkGap):
                story.sink.apply(frame, step, TABLE)
            continue
        story.sink.apply(frame, step, TABLE)
        at = max(at, upto)
        assert story.stored_rows() == held[at]


def test_sql_history_holds_every_change_once(url: str) -> None:
    sink = LocalSink(url, "target", HISTORY)
    sink.begin(EMPTY)
    first = [change("insert", 1, "a", 101), *update((1, "a"), (1, "b"), 102)]
    second = [*first, change("delete", 1, "b", 103)]
    sink.apply(changes_frame(first), Step("p1", "g", 100, 102), TABLE)
    sink.apply(changes_frame(second), Step("p1", "g", 100, 103), TABLE)
    sink.close()
    found = query(url, "SELECT _offset, _change_type, id, name FROM target ORDER BY _offset, _change_type DESC")
    assert found == [
        (101, "insert", 1, "a"),
        (102, "update_preimage", 1, "a"),
        (102, "update_postimage", 1, "b"),
        (103, "delete", 1, "b"),
    ]


# Attempts


class Speculative(LocalFrame):
    """A frame whose tasks run three times, as retried and speculative ones do; one report is used."""

    def mapInArrow(self, task: Any, schema: str) -> LocalFrame:
        for place, part in enumerate(self.partitions):
            list(run(task, place, part))
        made = super().mapInArrow(task, schema)
        for place, part in enumerate(self.partitions):
            list(run(task, place, part))
        return made

    def select(self, *names: str) -> LocalFrame:
        return Speculative(super().select(*names).partitions)


def test_staged_rows_of_speculative_attempts_are_never_merged(story: Story) -> None:
    story.begin()
    frame = Speculative(rows_frame(Story.FIRST, Story.SECOND).partitions)
    story.sink.load(frame, plan(), [Part(SPANS[0], 101), Part(SPANS[1], 102)])
    assert story.stored_rows() == Story.LOADED
    (stage,) = stages(story.url)
    assert query(story.url, f"SELECT count(*) FROM {stage}") == [(8,)]
    story.load()  # nothing to do, and what the others left is gone
    assert query(story.url, f"SELECT count(*) FROM {stage}") == [(0,)]
    story.begin()
    assert stages(story.url) == []


class Emptied(LocalFrame):
    """A frame after whose tasks the database restarts, which empties an unlogged table."""

    def __init__(self, partitions: list[pa.Table], url: str) -> None:
        super().__init__(partitions)
        self.url = url

    def select(self, *names: str) -> LocalFrame:
        return Emptied(super().select(*names).partitions, self.url)

    def mapInArrow(self, task: Any, schema: str) -> LocalFrame:
        made = super().mapInArrow(task, schema)
        query(self.url, f"DELETE FROM {stages(self.url)[0]}")
        return made


def test_staged_rows_lost_before_the_merge_leave_the_part_unloaded(story: Story) -> None:
    story.begin()
    frame = Emptied(rows_frame(Story.FIRST, Story.SECOND).partitions, story.url)
    with pytest.raises(Unavailable):
        story.sink.load(frame, plan(), [Part(SPANS[0], 101), Part(SPANS[1], 102)])
    state = story.sink.state()
    assert state and state.loaded == {}
    story.load()
    assert story.stored_rows() == Story.LOADED


# Other runs


def test_run_of_a_replaced_plan_is_fenced_by_the_sql_sink(story: Story) -> None:
    story.begin()
    story.load()
    other = LocalSink(story.url, "target")
    other.begin(plan("p2"))
    other.load(rows_frame({5: "five"}, {}), plan("p2"), [Part(SPANS[0], 101), Part(SPANS[1], 101)])
    for act in (story.load, story.apply):
        with pytest.raises(SinkFenced):
            act()
    assert story.stored_rows() == {5: "five"}
    other.close()


def test_run_waiting_for_the_lock_is_fenced_by_the_run_that_held_it(story: Story) -> None:
    """The new run empties the target in its transaction; the old run's merge waits, then sees the new plan."""
    story.begin()
    story.load()
    other, waiting, ended = LocalSink(story.url, "target"), threading.Event(), []
    event.listen(story.sink._engine, "before_cursor_execute", lambda *a: "FOR UPDATE" in a[2] and waiting.set())
    event.listen(story.sink._engine, "begin", lambda *a: waiting.set())

    def zombie() -> None:
        try:
            story.apply()
        except SinkFenced:
            ended.append("fenced")

    with other._engine.begin() as connection:
        other._states.lock(connection)
        thread = threading.Thread(target=zombie)
        thread.start()
        assert waiting.wait(PATIENCE)
        other._target(TABLE, TEXT_FORM).empty(connection)
        other._states.write(connection, _begun(plan("p2")))
    thread.join(60)
    assert ended == ["fenced"] and story.stored_rows() == {}
    other.close()


@pytest.mark.parametrize("engine_name", ["postgresql", "mysql"])  # SQLite has one writer at a time
@pytest.mark.parametrize("method", ["merge", "add"])
def test_second_driver_of_a_plan_keeps_the_rows_staged_by_the_first_driver(
    story: Story, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has counted the staged rows; an old run of the same plan, or a repair, begins to stage."""
    story.begin()
    if method == "merge":
        story.load()
    other, waiting, threads = LocalSink(story.url, "target"), threading.Event(), []
    event.listen(other._engine, "before_cursor_execute", lambda *a: "FOR UPDATE" in a[2] and waiting.set())
    original = getattr(Target, method)

    def stage() -> None:
        frame = changes_frame([]) if method == "merge" else rows_frame({})
        other._staging(frame, TABLE, plan())
        waiting.set()

    def meanwhile(self: Target, *args: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=stage))
            threads[0].start()
            assert waiting.wait(PATIENCE)
        original(self, *args)

    monkeypatch.setattr(Target, method, meanwhile)
    if method == "merge":
        story.apply()
    else:
        with suppress(Unavailable):  # the second part, if its rows went before it was begun
            story.load()
    threads[0].join(60)
    assert not threads[0].is_alive()
    if method == "add":
        story.load()
    assert story.stored_rows() == (Story.AFTER if method == "merge" else Story.LOADED)
    other.close()


def _begun(of: Any) -> Any:
    from headwater.pipeline.sinks.sink import State

    return State(of, of.offset)


def test_run_blocked_by_a_hanging_commit_is_refused_with_a_retryable_error(story: Story) -> None:
    story.begin()
    story.load()
    zombie = LocalSink(story.url, "target")
    impatient = Story(story.url)
    impatient.sink.close()
    impatient.sink = LocalSink(story.url, "target", lock_seconds=1)
    with zombie._engine.begin() as connection:
        zombie._states.lock(connection)
        with pytest.raises(Unavailable) as refused:
            impatient.sink.begin(plan("p2"))
        assert refused.value.retryable
    impatient.sink.begin(plan("p2"))
    assert story.stored_rows() == {}
    for sink in (zombie, impatient.sink):
        sink.close()


class Victim:
    """A process that runs the story and kills itself at a given write."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "tests.pipeline.sinks.sql_crash_process", url]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, action: str, number: int) -> str:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{action} {number}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture
def victim(url: str) -> Iterator[Victim]:
    made = Victim(url)
    yield made
    made.close()


# How many steps lie between two kills. Every step takes minutes: that is for `make soak`.
strides = pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.soak(seconds=30))])


@pytest.mark.slow
@strides
def test_driver_killed_anywhere_in_a_load_leaves_only_complete_parts(
    story: Story, victim: Victim, stride: int, fresh_number: int
) -> None:
    seen = set()
    for number in range(fresh_number % stride, 100, stride):
        story.begin()
        ended = victim.run("load", number)
        state = story.sink.state()
        assert state and ended in ("killed", "done")
        assert story.stored_rows() == _loaded(state.loaded)
        seen.add(len(state.loaded))
        story.load()
        assert story.stored_rows() == Story.LOADED
        if ended == "done":
            break
    assert ended == "done" and (seen == {0, 1, 2} if stride == 1 else 2 in seen)


def _loaded(loaded: dict[Any, int]) -> Rows:
    return (Story.FIRST if SPANS[0] in loaded else {}) | (Story.SECOND if SPANS[1] in loaded else {})


@pytest.mark.slow
@strides
def test_driver_killed_anywhere_in_a_merge_keeps_rows_and_offset_consistent(
    story: Story, victim: Victim, stride: int, fresh_number: int
) -> None:
    seen = set()
    for number in range(fresh_number % stride, 100, stride):
        story.begin()
        story.load()
        ended = victim.run("apply", number)
        state = story.sink.state()
        assert state and ended in ("killed", "done")
        assert story.stored_rows() == {100: Story.LOADED, 110: Story.AFTER}[state.offset]
        seen.add((ended, state.offset))
        story.apply()
        assert story.stored_rows() == Story.AFTER
        if ended == "done":
            break
    assert {("killed", 100), ("done", 110)} <= seen


@pytest.mark.slow
@strides
def test_driver_killed_anywhere_in_begin_is_replaced_by_the_next_driver(
    story: Story, victim: Victim, stride: int, fresh_number: int
) -> None:
    for number in range(fresh_number % stride, 100, stride):
        ended = victim.run("begin", number)
        assert ended in ("killed", "done")
        state = story.sink.state()
        assert story.stored_rows() == {} if state and not state.loaded else True
        story.begin()
        story.load()
        assert story.stored_rows() == Story.LOADED
        if ended == "done":
            break
    assert ended == "done"


# Values

WIDE = Table(
    "wide",
    (
        Column("key", "str"),
        Column("flag", "bool"),
        Column("whole", "i64"),
        Column("large", "u64"),
        Column("real", "f64"),
        Column("text", "str"),
        Column("blob", "bytes"),
        Column("day", "date"),
        Column("vector", "embedding"),
        Column("rest", "any"),
        Column('odd "name`s %s :x', "i64"),
    ),
    ("key",),
)
ODD = WIDE.columns[-1].name
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
I64 = st.integers(-(2**63), 2**63 - 1)
ROW = st.fixed_dictionaries(
    {
        "flag": st.none() | st.booleans(),
        "whole": st.none() | I64,
        "large": st.none() | st.integers(0, 2**64 - 1),
        "real": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "text": st.none() | TEXT,
        "blob": st.none() | st.binary(max_size=20),
        "day": st.none() | st.just("2026-02-28"),
        "vector": st.none() | st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=3),
        "rest": st.none() | TEXT,
        ODD: st.none() | I64,
        "_misfit": st.none() | st.just('{"whole":{"t":"str","v":"x"}}'),
    }
)


def read_back(sink: SqlSink, url: str, table: Table, types: str = TEXT_FORM) -> list[dict[str, Any]]:
    reader = RowReader(url, "wide", None, sink._dialect, table, [(None, None)], types)
    numbers = pa.record_batch({"id": [0]})
    return [row for batch in reader(iter([numbers])) for row in batch.to_pylist()]


@examples(25, phases=NO_SHRINKING, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(TEXT, ROW, max_size=8))
def test_sql_sink_returns_every_value_unchanged(url: str, rows: dict[str, dict[str, Any]]) -> None:
    sink = LocalSink(url, "wide")
    begun = plan(table=WIDE)
    sink.begin(begun)
    table = pa.Table.from_pylist([{"key": key, **row} for key, row in rows.items()], rows_schema(WIDE))
    sink.load(LocalFrame([table, table.slice(0, 0)]), begun, [Part(SPANS[0], 101), Part(SPANS[1], 101)])
    by_key = {row["key"]: row for row in read_back(sink, url, WIDE)}
    assert by_key == {row["key"]: row for row in table.to_pylist()}
    sink.close()


def load_wide(url: str, *rows: dict[str, Any], table: Table = WIDE) -> SqlSink:
    sink = LocalSink(url, "wide")
    begun = plan(table=table)
    sink.begin(begun)
    frame = LocalFrame([pa.Table.from_pylist(list(rows), rows_schema(table))] * 1)
    try:
        sink.load(frame, begun, [Part(SPANS[0], 101)])
    finally:
        sink.close()
    return sink


def test_keys_differing_in_case_or_blanks_are_stored_as_separate_rows(url: str) -> None:
    keys = ["a", "A", "a ", "ä", "a\u0308", "", " "]
    sink = load_wide(url, *({"key": key} for key in keys))
    assert sorted(row["key"] for row in read_back(sink, url, WIDE)) == sorted(keys)


def test_large_text_and_blobs_are_stored_in_full(url: str) -> None:
    row = {"key": "k", "text": "ü" * 2_000_000, "blob": bytes(range(256)) * 8_000}
    sink = load_wide(url, row)
    (found,) = read_back(sink, url, WIDE)
    assert found["text"] == row["text"] and found["blob"] == row["blob"]


def test_non_finite_numbers_are_read_back_from_every_database(url: str) -> None:
    told = '{"whole":{"t":"str","v":"x"}}'
    rows = [
        {"key": "a", "real": float("inf"), "_misfit": told},
        {"key": "b", "real": float("-inf")},
        {"key": "c", "real": float("nan")},
        {"key": "d", "real": -0.0, "_misfit": told},
    ]
    sink = load_wide(url, *rows)
    found = sorted(read_back(sink, url, WIDE), key=lambda row: row["key"])
    assert [(repr(row["real"]), row["_misfit"]) for row in found] == [
        ("inf", told),
        ("-inf", None),
        ("nan", None),
        ("-0.0", told),
    ]


UNFIT = {
    "postgresql": [({"key": "k", "text": "a\0b"}, "'text'")],
    "mysql": [({"key": "k" * 800}, "'key'")],
    "sqlite": [],
}


def test_value_the_database_cannot_hold_is_refused_with_its_column(url: str, engine_name: str) -> None:
    for row, column in [*UNFIT[engine_name], ({"key": None}, "'key'")]:
        with pytest.raises(SinkUnfit, match=column):
            load_wide(url, row)
        assert query(url, "SELECT count(*) FROM wide") == [(0,)]


def test_column_name_too_long_for_the_database_is_refused(url: str, engine_name: str) -> None:
    table = Table("t", (Column("id", "i64"), Column("c" * 65, "str")), ("id",))
    sink = LocalSink(url, "wide")
    if engine_name == "sqlite":
        sink.begin(plan(table=table))
    else:
        with pytest.raises(SinkUnfit, match="names of at most"):
            sink.begin(plan(table=table))
    sink.close()


def test_composite_key_of_text_and_bytes_keeps_rows_separate(url: str) -> None:
    table = Table("t", (Column("a", "str"), Column("b", "bytes"), Column("c", "i64")), ("a", "b", "c"))
    rows = [{"a": "x", "b": b"\0", "c": 1}, {"a": "x", "b": b"\0", "c": 2}, {"a": "x", "b": b"", "c": 1}]
    sink = load_wide(url, *rows, table=table)
    assert len(read_back(sink, url, table)) == 3


# Typed columns

TYPES = Table(
    "wide",
    (
        Column("key", "str"),
        Column("price", "dec", "numeric(10,2)"),
        Column("long", "dec", "numeric(38,10)"),
        Column("fine", "dec", "numeric(38,38)"),
        Column("rough", "any", "DECIMAL(15,15)"),
        Column("day", "date", "date"),
        Column("at", "datetime", "timestamp with time zone"),
        Column("local", "datetime", "timestamp without time zone"),
    ),
    ("key",),
)


def scaled(digits: int, scale: int) -> st.SearchStrategy[Decimal | None]:
    most = 10**digits - 1
    return st.none() | st.integers(-most, most).map(lambda number: Decimal(number).scaleb(-scale, EXACT))


EXACT = Context(prec=40)
TYPED_ROW = st.fixed_dictionaries(
    {
        "price": scaled(10, 2),
        "long": scaled(38, 10),
        "fine": scaled(38, 38),
        "rough": scaled(15, 15),
        "day": st.none() | st.dates(),
        "at": st.none() | st.datetimes(timezones=st.just(UTC)),
        "local": st.none() | st.datetimes(),
    }
)


def load_typed(url: str, *rows: dict[str, Any], id: str = "p1", types: str = TYPED) -> SqlSink:
    begun = msgspec.structs.replace(plan(id, TYPES), types=types)
    frame = LocalFrame([pa.Table.from_pylist(list(rows), rows_schema(TYPES, types=types))])
    with closing(LocalSink(url, "wide")) as sink:
        sink.begin(begun)
        sink.load(frame, begun, [Part(SPANS[0], 101)])
    return sink


@examples(25, phases=NO_SHRINKING, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TYPED_ROW, max_size=5))
@example([{"at": datetime.max.replace(tzinfo=UTC), "local": datetime.max, "day": date.max}])
@example([{"at": datetime.min.replace(tzinfo=UTC), "local": datetime.min, "day": date.min}])
def test_sql_sink_returns_every_typed_value_unchanged(url: str, rows: list[dict[str, Any]]) -> None:
    told = {str(number): {"key": str(number), "_misfit": None} | row for number, row in enumerate(rows)}
    sink = load_typed(url, *told.values())
    found = {row["key"]: row for row in read_back(sink, url, TYPES, TYPED)}
    nothing = dict.fromkeys(TYPES.names)
    assert found == {key: nothing | row for key, row in told.items()}


@pytest.mark.parametrize("engine_name", ["postgresql"])
@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Pacific/Pago_Pago"])
def test_first_and_last_moment_are_read_whatever_the_zone_of_the_database(url: str, zone: str) -> None:
    query(url, f"ALTER DATABASE {sa.make_url(url).database} SET timezone = '{zone}'")
    moments = {"first": datetime.min.replace(tzinfo=UTC), "last": datetime.max.replace(tzinfo=UTC)}
    sink = load_typed(url, *({"key": key, "at": at} for key, at in moments.items()))
    assert {row["key"]: row["at"] for row in read_back(sink, url, TYPES, TYPED)} == moments


DDL = {
    "postgresql": {
        "price": "NUMERIC(10, 2)",
        "long": "NUMERIC(38, 10)",
        "fine": "NUMERIC(38, 38)",
        "rough": "NUMERIC(15, 15)",
        "day": "DATE",
        "at": "TIMESTAMP WITH TIME ZONE",
        "local": "TIMESTAMP WITHOUT TIME ZONE",
    },
    "mysql": {
        "price": "NUMERIC(10, 2)",
        "long": "NUMERIC(38, 10)",
        "fine": "TEXT",
        "rough": "NUMERIC(15, 15)",
        "day": "DATE",
        "at": "DATETIME(6)",
        "local": "DATETIME(6)",
    },
    "sqlite": {
        "price": "NUMERIC(10, 2)",
        "long": "TEXT",
        "fine": "TEXT",
        "rough": "NUMERIC(15, 15)",
        "day": "DATE",
        "at": "DATETIME",
        "local": "DATETIME",
    },
}
DIALECTS = {"postgresql": postgresql.dialect, "mysql": mysql.dialect, "sqlite": sqlite.dialect}


@pytest.mark.parametrize("backend", DDL)
def test_typed_columns_have_the_exact_types_of_the_database(backend: str) -> None:
    target = Target("wide", None, Dialect(backend, "utf8mb4_bin"), fields_of(TYPES, UPSERT, TYPED))
    made = {column.name: column.type.compile(DIALECTS[backend]()) for column in target.table.columns}
    assert {name: made[name] for name in DDL[backend]} == DDL[backend]


def test_new_snapshot_of_the_other_form_replaces_the_columns(url: str) -> None:
    texts = {"price": "12.30", "day": "2026-01-31", "at": "2026-01-31T10:00:00+00:00", "local": "2026-01-31T10:00:00"}
    typed = {"price": Decimal("12.30"), "day": date(2026, 1, 31), "at": datetime(2026, 1, 31, 10, tzinfo=UTC)}
    for number, (types, row) in enumerate([(TEXT_FORM, texts), (TYPED, typed), (TEXT_FORM, texts), (TYPED, typed)]):
        sink = load_typed(url, {"key": "k", **row}, id=f"p{number}", types=types)
        (found,) = read_back(sink, url, TYPES, types)
        assert {name: found[name] for name in row} == row


def test_run_killed_while_columns_are_replaced_begins_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load_typed(url, {"key": "k", "price": "12.30"}, types=TEXT_FORM)
    with monkeypatch.context() as patch:
        patch.setattr(Target, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load_typed(url, id="p2")
    nothing = LocalFrame([pa.Table.from_pylist([], rows_schema(TYPES))])
    with closing(LocalSink(url, "wide")) as sink:
        assert sink.state() is None
        with pytest.raises(SinkFenced):
            sink.load(nothing, plan(table=TYPES), [Part(SPANS[0], 101)])
    (found,) = read_back(load_typed(url, {"key": "k", "price": Decimal("1.50")}, id="p3"), url, TYPES, TYPED)
    assert found["price"] == Decimal("1.50")


def test_column_of_a_wider_number_is_kept_and_of_a_narrower_one_replaced(url: str) -> None:
    is_mysql = url.startswith("mysql")
    key = "`key` VARCHAR(20) COLLATE utf8mb4_nopad_bin" if is_mysql else '"key" VARCHAR(20)'
    long = "`long`" if is_mysql else '"long"'
    query(url, f"CREATE TABLE wide ({key} PRIMARY KEY, price NUMERIC(20, 4), {long} NUMERIC(5, 1))")
    (found,) = read_back(load_typed(url, {"key": "k", "long": Decimal("0.0000000001")}), url, TYPES, TYPED)
    assert found["long"] == Decimal("0.0000000001")
    engine = sa.create_engine(url)
    types = {column["name"]: column["type"] for column in sa.inspect(engine).get_columns("wide")}
    engine.dispose()
    assert (types["price"].precision, types["price"].scale) == (20, 4)


def test_typed_column_of_another_type_requires_a_new_snapshot(url: str) -> None:
    sink = load_typed(url, {"key": "k", "price": Decimal("12.30")})
    price = Column("price", "dec", "numeric(10,4)")
    other = msgspec.structs.replace(TYPES, columns=(TYPES.columns[0], price, *TYPES.columns[2:]), version=2)
    with pytest.raises(PipelineError, match="'price' are of another type") as refused:
        sink.evolve(other)
    assert refused.value.extra["resnapshot_reason"] == "schema_changed"
    sink.close()


# The user's own table


def test_new_column_is_added_and_rows_keep_their_values(story: Story) -> None:
    story.begin()
    story.load()
    wider = Table("t", (*TABLE.columns, Column("more", "i64")), ("id",), version=2)
    story.sink.evolve(wider)
    state = story.sink.state()
    assert state and state.plan.table == wider and state.plan.id == "p1"
    assert stages(story.url) == []
    story.apply()
    assert story.stored_rows() == Story.AFTER
    assert query(story.url, "SELECT count(*), count(more) FROM target") == [(4, 0)]


def test_readded_column_with_old_values_requires_a_new_snapshot(story: Story) -> None:
    story.begin()
    story.load()
    narrow = Table("t", TABLE.columns[:1], ("id",), version=2)
    again = msgspec.structs.replace(TABLE, version=3)
    story.sink.evolve(narrow)
    with pytest.raises(PipelineError) as refused:
        story.sink.evolve(again)
    assert refused.value.extra["resnapshot_reason"] == "schema_changed"
    state = story.sink.state()
    assert state and state.plan.table == narrow
    query(story.url, "UPDATE target SET name = NULL")
    story.sink.evolve(again)  # as if it had just been added by a run that was killed then
    state = story.sink.state()
    assert state and state.plan.table == again


def test_empty_user_table_with_the_right_key_is_accepted(story: Story) -> None:
    query(story.url, "CREATE TABLE target (id BIGINT PRIMARY KEY, note VARCHAR(10) DEFAULT 'x')")
    story.begin()
    story.load()
    assert story.stored_rows() == Story.LOADED
    assert query(story.url, "SELECT DISTINCT note FROM target") == [("x",)]


def test_user_table_with_another_key_is_refused(story: Story) -> None:
    query(story.url, "CREATE TABLE target (id BIGINT, name VARCHAR(10) PRIMARY KEY)")
    with pytest.raises(SinkUnfit, match="primary key"):
        story.begin()


def test_table_with_rows_of_no_pipeline_is_refused_and_keeps_them(story: Story) -> None:
    query(story.url, "CREATE TABLE target (id BIGINT NOT NULL PRIMARY KEY, mine VARCHAR(10))")
    query(story.url, "INSERT INTO target VALUES (7, 'precious')")
    with pytest.raises(SinkUnfit, match="'target' contains rows that no pipeline wrote") as refused:
        story.begin()
    assert "replace = true" in refused.value.hint
    assert query(story.url, "SELECT * FROM target") == [(7, "precious")]
    assert story.sink.state() is None
    chosen = open_sql({"url": story.url, "table": "target", "replace": True})
    chosen.begin(plan())
    chosen.close()
    assert story.stored_rows() == {}
    story.load()
    story.sink.begin(plan("p2"))  # the rows are the pipeline's by now
    assert story.stored_rows() == {}


# Settings


def test_sql_sink_never_shows_its_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = "postgresql://someone:s3cret@127.0.0.1:1/shop"
    file = tmp_path / "url"
    file.write_text(url + "\n")
    monkeypatch.setenv("HEADWATER_SINK_URL", url)
    monkeypatch.setenv("MY_LAKE", url)
    for place in ({"url": url}, {"url_file": str(file)}, {"url_env": "MY_LAKE"}, {}):
        sink = open_sql({"table": "orders", **place})
        assert sink.name == "postgresql 127.0.0.1:1/shop orders"
        with pytest.raises(Unavailable) as refused:
            sink.state()
        assert "s3cret" not in f"{sink!r} {refused.value} {refused.value.details}"
        sink.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"table": "t", "url": "oracle://x"}, "oracle"),
        ({"table": "t", "url": "no url"}, "not the URL"),
        ({"table": "t", "url": "sqlite://"}, "in memory"),
        ({"table": "t", "url_file": "/nowhere/at/all"}, "cannot be read"),
        ({"table": "t", "url_env": "NOT_SET_ANYWHERE"}, "needs a URL"),
        ({"table": "t", "url": "sqlite:///x.db", "mode": "append"}, "append"),
        ({"table": "t", "url": "sqlite:///x.db", "tabel": "x"}, "tabel"),
        ({"table": "t", "url": "sqlite:///x.db", "replace": "yes"}, "replace"),
        ({"table": "t", "url": "sqlite:///x.db", "lock_seconds": "long"}, "lock_seconds"),
        ({"url": "sqlite:///x.db"}, "`table` is needed"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_sink("sql", settings, name="t", spark=None)  # type: ignore[arg-type]
