"""The contract of every sink, checked against a model: sinks of every kind on the targets of sink_targets.py.

`make test` runs the whole contract on the embedded sinks, and on the others the tests marked `every_sink`;
`make soak` runs the whole contract on all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession
from tests.pipeline.sinks.sink_targets import FACTORIES, Factory, Target
from tests.pipeline.table_model import MIDDLE, SPANS, TABLE, Gate, Slow, Story, canon, frame_of, row

from headwater.errors import HeadwaterError, SinkFenced, SinkGap, SinkUnfit
from headwater.model.keys.key import Span, encode_key
from headwater.model.table import Column, Table
from headwater.pipeline.sinks.sink import HISTORY, UPSERT, Part, Plan, Sink, State, Step
from headwater.pipeline.transform.schema import changes_schema, rows_schema


@pytest.fixture(params=FACTORIES, ids=lambda factory: factory.name)
def factory(request: pytest.FixtureRequest) -> Factory:
    found: Factory = request.param
    found.require()
    return found


@pytest.fixture
def exact(factory: Factory) -> None:
    if not factory.exactly_once:
        pytest.skip("promises only at least once")


@pytest.fixture
def target(factory: Factory, spark: SparkSession, tmp_path: Path) -> Iterator[Target]:
    made = factory.make(spark, tmp_path, factory.mode)
    yield made
    made.close()


@pytest.fixture
def sink(target: Target) -> Iterator[Sink]:
    opened = target.sink()
    yield opened
    opened.close()


@pytest.fixture
def other(target: Target) -> Iterator[Sink]:
    """Open the same target as another driver."""
    opened: Sink = getattr(target, "rival", target.sink)()
    yield opened
    opened.close()


@pytest.fixture
def story() -> Story:
    """Return a story with five rows on both sides of the middle."""
    told = Story()
    for key in (1, 2, 3, 100, 101):
        told.insert(row(key, f"n{key}", total=key / 4))
    return told


def begun(spark: SparkSession, sink: Sink, story: Story, name: str = "p1") -> Plan:
    """Load the whole current table into the sink; return the plan."""
    plan = story.plan(name)
    sink.begin(plan)
    load(spark, sink, story, plan, *(Part(span, story.offset) for span in plan.spans))
    return plan


def load(spark: SparkSession, sink: Sink, story: Story, plan: Plan, *parts: Part) -> None:
    sink.load(story.loading(spark, parts, ends=sink.needs_ends), plan, parts)


def apply(spark: SparkSession, sink: Sink, story: Story, plan: Plan, after: int, upto: int) -> None:
    sink.apply(story.changes(spark, after, upto), story.step(plan, after, upto), story.table)


def state_of(sink: Sink) -> State:
    state = sink.state()
    assert state is not None
    return state


def assert_holds(target: Target, factory: Factory, rows: dict[int, Any]) -> None:
    assert canon(target.rows()) == canon(list(rows.values()))
    if factory.mode == HISTORY and factory.exactly_once:
        images = target.images()
        assert len(images) == len(set(images))


# From nothing to live


def test_sink_never_begun_has_no_state(sink: Sink) -> None:
    assert sink.state() is None


def test_empty_table_is_loaded_and_then_followed(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory
) -> None:
    story = Story()
    plan = begun(spark, sink, story)
    assert state_of(sink).is_even
    assert_holds(target, factory, {})
    story.insert(row(1))
    apply(spark, sink, story, plan, 0, 1)
    assert_holds(target, factory, story.rows)


@pytest.mark.every_sink
def test_parts_loaded_in_waves_report_the_missing_spans(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory, story: Story
) -> None:
    plan = story.plan("p1")
    sink.begin(plan)
    assert state_of(sink) == State(plan, story.offset)
    load(spark, sink, story, plan, Part(SPANS[1], story.offset))
    assert state_of(sink).missing == [SPANS[0]]
    assert state_of(sink).loaded == {SPANS[1]: story.offset}
    load(spark, sink, story, plan, Part(SPANS[0], story.offset))
    assert state_of(sink).missing == []
    assert_holds(target, factory, story.rows)


@pytest.mark.every_sink
def test_steps_move_rows_and_offset_together_for_every_sink_object(
    spark: SparkSession, sink: Sink, other: Sink, target: Target, factory: Factory, story: Story
) -> None:
    plan = begun(spark, sink, story)
    story.update(2, row(2, "second"))
    story.delete(3)
    story.insert(row(102, "new"))
    apply(spark, sink, story, plan, 5, 7)
    assert state_of(other).offset == 7
    apply(spark, other, story, plan, 7, 8)
    assert state_of(sink) == State(plan, 8)
    assert_holds(target, factory, story.rows)


def test_step_without_changes_moves_the_offset(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory, story: Story
) -> None:
    plan = begun(spark, sink, story)
    sink.apply(frame_of(spark, changes_schema(TABLE), [[], []]), Step(plan.id, plan.generation, 5, 9), TABLE)
    assert state_of(sink).offset == 9
    assert_holds(target, factory, story.rows)


def test_delete_of_an_absent_key_moves_the_offset(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory, story: Story
) -> None:
    if factory.mode == HISTORY:
        pytest.skip("a history has no opinion on it")
    plan = begun(spark, sink, story)
    ghost = row(77) | {
        "_change_type": "delete",
        "_commit_version": 6,
        "_offset": 6,
        "_txn": "t",
        "_commit_timestamp": 6,
    }
    sink.apply(frame_of(spark, changes_schema(TABLE), [[ghost]]), Step(plan.id, plan.generation, 5, 6), TABLE)
    assert state_of(sink).offset == 6
    assert_holds(target, factory, story.rows)


def test_new_plan_empties_the_sink(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory, story: Story
) -> None:
    begun(spark, sink, story)
    plan = story.plan("p2")
    sink.begin(plan)
    assert state_of(sink) == State(plan, story.offset)
    if factory.mode == UPSERT:
        assert target.rows() == []
    story.delete(1)
    load(spark, sink, story, plan, *(Part(span, story.offset) for span in SPANS))
    assert state_of(sink).loaded == dict.fromkeys(SPANS, story.offset)


# Repeats


@pytest.mark.usefixtures("exact")
def test_part_already_loaded_is_skipped(
    spark: SparkSession, sink: Sink, other: Sink, target: Target, factory: Factory, story: Story
) -> None:
    plan = begun(spark, sink, story)
    before = state_of(sink)
    load(spark, sink, story, plan, *(Part(span, 5) for span in SPANS))
    load(spark, other, story, plan, Part(SPANS[0], 3))
    assert state_of(sink) == before
    assert_holds(target, factory, story.rows)


@pytest.mark.every_sink
@pytest.mark.usefixtures("exact")
def test_step_applied_twice_or_overlapping_applies_each_change_once(
    spark: SparkSession, sink: Sink, other: Sink, target: Target, factory: Factory, story: Story
) -> None:
    plan = begun(spark, sink, story)
    story.update(1, row(1, "a"))
    story.delete(2)
    apply(spark, sink, story, plan, 5, 7)
    apply(spark, other, story, plan, 5, 7)
    assert_holds(target, factory, story.rows)
    story.insert(row(2, "again"))
    story.update(1, row(1, "b"))
    apply(spark, other, story, plan, 5, 9)
    assert state_of(sink).offset == 9
    assert_holds(target, factory, story.rows)


@pytest.mark.usefixtures("exact")
def test_step_after_a_gap_is_refused(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory, story: Story
) -> None:
    plan = begun(spark, sink, story)
    rows = story.rows
    story.delete(1)
    story.delete(2)
    with pytest.raises(SinkGap):
        apply(spark, sink, story, plan, 6, 7)
    assert state_of(sink).offset == 5
    assert_holds(target, factory, rows)


# Other drivers


@pytest.mark.every_sink
@pytest.mark.usefixtures("exact")
def test_run_is_fenced_by_a_newer_plan(
    spark: SparkSession, sink: Sink, other: Sink, target: Target, factory: Factory, story: Story
) -> None:
    old = begun(spark, sink, story)
    new = begun(spark, other, story, "p2")
    rows = story.rows
    story.delete(1)
    with pytest.raises(SinkFenced):
        load(spark, sink, story, old, Part(SPANS[0], 5))
    with pytest.raises(SinkFenced):
        apply(spark, sink, story, old, 5, 6)
    assert state_of(sink).plan.id == new.id
    assert_holds(target, factory, rows)


@pytest.mark.usefixtures("exact")
def test_load_is_fenced_by_a_plan_begun_during_its_write(
    spark: SparkSession, sink: Sink, other: Sink, target: Target, factory: Factory, story: Story, tmp_path: Path
) -> None:
    old, gate = story.plan("p1"), Gate(tmp_path)
    parts = [Part(span, story.offset) for span in SPANS]
    sink.begin(old)
    slow = started(lambda: sink.load(story.loading(spark, parts, gate, ends=sink.needs_ends), old, parts))
    gate.reached()
    new = story.plan("p2")
    other.begin(new)
    gate.go(slow)
    assert isinstance(slow(), SinkFenced)
    load(spark, other, story, new, *parts)
    assert_holds(target, factory, story.rows)


@pytest.mark.every_sink
@pytest.mark.usefixtures("exact")
def test_step_is_fenced_by_a_plan_begun_during_its_write(
    spark: SparkSession, sink: Sink, other: Sink, target: Target, factory: Factory, story: Story, tmp_path: Path
) -> None:
    old, gate = begun(spark, sink, story), Gate(tmp_path)
    rows = story.rows
    story.delete(1)
    story.insert(row(200))
    frame = story.changes(spark, 5, 7, gate=gate)
    slow = started(lambda: sink.apply(frame, story.step(old, 5, 7), TABLE))
    gate.reached()
    new = story.plan("p2")
    new = msgspec.structs.replace(new, offset=5)
    other.begin(new)
    load(spark, other, story, new, *(Part(span, 5) for span in SPANS))
    gate.go(slow)
    assert isinstance(slow(), SinkFenced)
    assert state_of(other) == State(new, 5, dict.fromkeys(SPANS, 5))
    assert_holds(target, factory, rows)


@pytest.mark.usefixtures("exact")
def test_overlapping_steps_of_two_drivers_apply_each_change_once(
    spark: SparkSession, sink: Sink, other: Sink, target: Target, factory: Factory, story: Story, tmp_path: Path
) -> None:
    plan, gate = begun(spark, sink, story), Gate(tmp_path)
    for number in range(4):
        story.update(1, row(1, f"v{number}"))
        story.update(100, row(100, f"v{number}"))
    frame = story.changes(spark, 5, story.offset, gate=gate)
    slow = started(lambda: sink.apply(frame, story.step(plan, 5, story.offset), TABLE))
    gate.reached()
    apply(spark, other, story, plan, 5, 9)
    gate.go(slow)
    assert slow() is None
    assert state_of(sink) == State(plan, story.offset)
    assert_holds(target, factory, story.rows)


@pytest.mark.usefixtures("exact")
def test_part_written_by_two_concurrent_attempts_is_loaded_once(
    spark: SparkSession, sink: Sink, other: Sink, target: Target, factory: Factory, story: Story, tmp_path: Path
) -> None:
    plan, gate = story.plan("p1"), Gate(tmp_path)
    parts = [Part(span, story.offset) for span in SPANS]
    sink.begin(plan)
    slow = started(lambda: sink.load(story.loading(spark, parts, gate, ends=sink.needs_ends), plan, parts))
    gate.reached()
    load(spark, other, story, plan, *parts)
    gate.go(slow)
    assert slow() is None
    assert_holds(target, factory, story.rows)


@pytest.mark.every_sink
def test_part_whose_source_dies_midway_is_loaded_completely_on_retry(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory, story: Story, tmp_path: Path
) -> None:
    """The task that reads the part cannot tell a killed source from the end of the data."""
    for key in range(4, 64):
        story.insert(row(key))
    plan, parts = story.plan("p1"), [Part(span, story.offset) for span in SPANS]
    sink.begin(plan)
    with pytest.raises(Exception, match="exited unexpectedly|lost in the middle"):
        sink.load(story.loading(spark, parts, ends=sink.needs_ends, dies=tmp_path / "died"), plan, parts)
    load(spark, sink, story, plan, *parts)
    assert_holds(target, factory, story.rows)


def started(act: Callable[[], None]) -> Slow:
    """Run `act` in a thread."""
    return Slow(act)


# Keys


@pytest.mark.every_sink
def test_step_keeps_the_last_change_of_each_key_when_keys_move_and_swap(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory, story: Story
) -> None:
    plan = begun(spark, sink, story)
    story.update(1, row(-1, "one"))  # swap 1 and 2 by way of -1
    story.update(2, row(1, "two"))
    story.update(-1, row(2, "one"))
    story.delete(3)
    story.insert(row(3, "third"))
    story.insert(row(50, "short-lived"))
    story.delete(50)
    story.update(100, row(5, "across the middle"))
    for number in range(5):
        story.update(101, row(101, f"v{number}"))
    apply(spark, sink, story, plan, 5, story.offset)
    assert_holds(target, factory, story.rows)


def test_spans_loaded_at_different_offsets_are_brought_to_the_same_offset(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory, story: Story
) -> None:
    plan = story.plan("p1")
    sink.begin(plan)
    load(spark, sink, story, plan, Part(SPANS[0], 5))
    story.update(100, row(100, "seen by the second part"))
    story.delete(1)
    load(spark, sink, story, plan, Part(SPANS[1], 7))
    story.insert(row(110, "late"))
    assert not state_of(sink).is_even
    step = story.step(plan, 5, 6)
    sink.apply(story.changes(spark, 5, 6, lambda key: 7 if key >= 100 else 5), step, TABLE)
    assert state_of(sink) == State(plan, 6, {SPANS[1]: 7})
    step = story.step(plan, 6, 8)
    sink.apply(story.changes(spark, 6, 8, lambda key: 7 if key >= 100 else 6), step, TABLE)
    assert state_of(sink) == State(plan, 8)
    assert_holds(target, factory, story.rows)


# Values and shapes

VALUES = [
    {
        "total": float("nan"),
        "big": 2**64 - 1,
        "ok": True,
        "vec": [0.5, -1.0],
        "price": "12345678901234567890.000000001",
    },
    {"total": float("inf"), "big": 0, "ok": False, "vec": [], "price": "-0.10"},
    {"name": None, "total": None, "data": None, "big": None, "ok": None, "vec": None, "price": None},
    {"name": "", "data": b"", "total": -0.0},
    {"name": "żółw 🐢\u2028 'quoted' \"twice\" \\ line\nbreak\ttab", "data": bytes(range(256))},
    {"name": "long " * 100_000, "data": b"\x00\xff" * 100_000},
    {"_misfit": '{"total":{"str":"not a number"}}'},
    {"name": "NULL", "total": 1e308},
]


@pytest.mark.every_sink
def test_values_of_every_kind_are_kept_by_snapshot_and_changes(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory
) -> None:
    story = Story()
    for key, values in enumerate(VALUES):
        story.insert(row(key, **{"name": "n", **values}))
    plan = begun(spark, sink, story)
    assert_holds(target, factory, story.rows)
    for key, values in enumerate(VALUES):
        story.update(len(VALUES) - 1 - key, row(len(VALUES) - 1 - key, **{"name": "n", **values}))
        story.insert(row(1000 + key, **{"name": "n", **values}))
    apply(spark, sink, story, plan, plan.offset, story.offset)
    assert_holds(target, factory, story.rows)
    if factory.mode == UPSERT:
        read = [each.asDict() for each in sink.rows(spark).collect()]
        assert canon([_plain(each) for each in read]) == canon(list(story.rows.values()))


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    return {name: bytes(value) if isinstance(value, bytearray) else value for name, value in found.items()}


def test_new_column_is_null_in_old_rows_and_dropped_column_is_null_in_new_rows(
    spark: SparkSession, sink: Sink, other: Sink, target: Target, factory: Factory, story: Story
) -> None:
    plan = begun(spark, sink, story)
    columns = tuple(each for each in TABLE.columns if each.name != "price")
    story.table = Table("t", (*columns, Column("colour", "str")), TABLE.key, version=2)
    sink.evolve(story.table)
    sink.evolve(story.table)
    assert state_of(other).plan == msgspec.structs.replace(plan, table=story.table)
    assert state_of(other).offset == 5
    for key in list(story.rows):
        old = story.rows[key]
        story.rows[key] = {**old, "colour": None}
    story.update(1, {**row(1, "one"), "colour": "red"})
    story.insert({**row(7, "seven"), "colour": "blue"})
    apply(spark, other, story, plan, 5, 7)
    assert_holds(target, factory, story.rows)
    assert "colour" in other.rows(spark).columns if factory.mode == UPSERT else True


# What is refused


def test_snapshot_refused_for_a_null_key_continues_once_the_row_is_fixed(
    spark: SparkSession, sink: Sink, other: Sink, target: Target, factory: Factory, story: Story
) -> None:
    if factory.name.startswith(("parquet", "foreach")):
        pytest.skip("takes rows without a key too")
    plan = story.plan("p1")
    sink.begin(plan)
    load(spark, sink, story, plan, Part(SPANS[1], 5))
    bad = [row(1, "n1"), row(2, "n2") | {"id": None}]
    with pytest.raises(SinkUnfit, match="'id'") as refused:
        sink.load(frame_of(spark, rows_schema(TABLE), [bad], ends=sink.needs_ends), plan, [Part(SPANS[0], 5)])
    assert "NOT NULL primary key" in refused.value.hint
    assert state_of(other) == State(plan, 5, {SPANS[1]: 5})
    load(spark, other, story, plan, Part(SPANS[0], 5))
    assert_holds(target, factory, story.rows)
    story.delete(2)
    apply(spark, other, story, plan, 5, 6)
    assert state_of(sink) == State(plan, 6)
    assert_holds(target, factory, story.rows)


# Names

ODD = (
    "a.b",
    "back`tick",
    "two``ticks",
    'quo"te',
    "_deleted",
    "_offset",
    "_MISFIT",
    "select",
    "Ünï",
    "a b,;{}()=",
    "5%s",
)


def test_column_names_that_need_quoting_are_loaded_and_applied_by_every_sink(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory
) -> None:
    if factory.name.startswith(("delta-spark", "foreach")):
        pytest.skip("refuses such names, or leaves them to the function")
    table = Table("odd.t`", (Column("the.`key`", "i64"), *(Column(name, "i64") for name in ODD)), ("the.`key`",))
    names = rows_schema(table).names
    about = changes_schema(table).names[len(names) :]

    def line(key: int, value: int, *told: Any) -> dict[str, Any]:
        return dict(zip([*names, *about], [key, *[value] * len(ODD), None, *told], strict=False))

    plan, part = Plan("p1", "g1", 1, (Span.all(),), table), Part(Span.all(), 1)
    sink.begin(plan)
    rows = [line(1, 1), line(2, 2)]
    sink.load(frame_of(spark, rows_schema(table), [rows], ends=sink.needs_ends), plan, [part])
    changes = [
        line(1, 1, "update_preimage", 2, None, 2, "t"),
        line(1, 7, "update_postimage", 2, None, 2, "t"),
        line(2, 2, "delete", 3, None, 3, "t"),
    ]
    sink.apply(frame_of(spark, changes_schema(table), [changes]), Step("p1", "g1", 1, 3), table)
    assert state_of(sink) == State(plan, 3)
    if factory.mode == UPSERT:
        found = sink.rows(spark)
        assert (found.columns, [tuple(each) for each in found.collect()]) == (names, [tuple(line(1, 7).values())])


# Repairs


def test_repair_step_fixes_rows_and_keeps_the_offset(
    spark: SparkSession, sink: Sink, target: Target, factory: Factory, story: Story
) -> None:
    if factory.mode == HISTORY:
        pytest.skip("only a current table is verified")
    plan = begun(spark, sink, story)
    apply(spark, sink, story, plan, 0, 5)
    story.update(1, row(1, "mended"))
    story.delete(2)
    frame = story.changes(spark, 5, 7)
    sink.apply(frame, Step(plan.id, plan.generation, 5, 5, repair=True), TABLE)
    assert state_of(sink).offset == 5
    assert_holds(target, factory, story.rows)
    with pytest.raises(SinkFenced):
        sink.apply(frame, Step(plan.id, plan.generation, 4, 4, repair=True), TABLE)


# All of it, at random


@pytest.mark.parametrize("seed", range(2))
def test_random_changes_in_random_steps_end_equal_to_the_model(
    spark: SparkSession, target: Target, factory: Factory, seed: int
) -> None:
    dice = random.Random(seed)
    story = Story()
    change(story, dice, 10)
    spans = (Span(b"", encode_key((4,))), Span(encode_key((4,)), MIDDLE), Span(MIDDLE, None))
    plan = story.plan(f"p{seed}", spans)
    sink = target.sink()
    sink.begin(plan)
    versions: dict[Span, int] = {}
    for span in dice.sample(spans, len(spans)):
        change(story, dice, 2)
        versions[span] = story.offset
        load(spark, sink, story, plan, Part(span, story.offset))
    for _ in range(4):
        change(story, dice, dice.randrange(8))
        state = state_of(sink)
        replays = factory.exactly_once and dice.random() < 0.5
        after = dice.randint(plan.offset, state.offset) if replays else state.offset
        upto = dice.randint(after, story.offset)
        if dice.random() < 0.3:
            sink.close()
            sink = target.sink()
        sink.apply(story.changes(spark, after, upto, reached_by(versions)), story.step(plan, after, upto), TABLE)
    state = state_of(sink)
    last = max(state.offset, *versions.values(), story.offset)
    if last > state.offset:
        frame = story.changes(spark, state.offset, last, reached_by(versions))
        sink.apply(frame, story.step(plan, state.offset, last), TABLE)
    assert state_of(sink) == State(plan, last)
    assert_holds(target, factory, story.rows)
    sink.close()


def reached_by(versions: dict[Span, int]) -> Callable[[int], int]:
    return lambda key: next(at for span, at in versions.items() if span.contains(encode_key((key,))))


def change(story: Story, dice: random.Random, count: int) -> None:
    """Make random changes of few keys, so that they collide."""
    for number in range(count):
        key, to = (dice.choice([1, 2, 3, 4, 5, 99, 100, 101]) for _ in range(2))
        new = row(to, f"{story.offset}/{number}", total=dice.random())
        if key not in story.rows:
            story.insert({**new, "id": key})
        elif dice.random() < 0.3:
            story.delete(key)
        elif to == key or to not in story.rows:
            story.update(key, new)


def test_step_on_a_sink_never_begun_raises_a_headwater_error(spark: SparkSession, sink: Sink, story: Story) -> None:
    with pytest.raises(HeadwaterError):
        apply(spark, sink, story, story.plan("p1"), 0, 5)
