"""The next step of a pipeline: every case of the stage machine, and ranges after splits and merges."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from headwater.client.responses import Described
from headwater.errors import SchemaChanged, SinkFenced, SinkGap
from headwater.model.keys.key import Span, encode_key
from headwater.model.table import Column, Table
from headwater.pipeline.run.stages import Apply, Begin, Evolve, Load, Wait, decide, lowest, span_progress
from headwater.pipeline.sinks.sink import Plan, State, Step, check

TABLE = Table("orders", (Column("id", "i64"), Column("what", "str")), ("id",), version=3)


def spans_at(*keys: int) -> tuple[Span, ...]:
    bounds = [b"", *(encode_key((key,)) for key in keys)]
    return tuple(Span(start, end) for start, end in zip(bounds, [*bounds[1:], None], strict=True))


SPANS = spans_at(10, 20, 30)
PLAN = Plan("p1", "g1", 100, SPANS, TABLE)


def log_status(**given: object) -> Described:
    """Return the status of the table's log, with these fields changed."""
    shape = replace(TABLE, version=given.pop("version", 3))  # type: ignore[arg-type]
    told = {"generation": "g1", "horizon": 1, "latest": 200, "table_latest": 200, "table": shape, "version": "g1.200"}
    return Described(**told | given)  # type: ignore[arg-type]


def next_of(state: State | None, log: Described, policy: str = "evolve", wave: int = 2, step: int = 50) -> object:
    if state is not None:
        log = replace(log, step_upto=min(state.offset + step, log.latest))
    return decide(state, log, shape=3, policy=policy, wave=wave)


def test_empty_sink_begins_a_first_snapshot() -> None:
    assert next_of(None, log_status()) == Begin("first")


def test_missing_spans_are_loaded_in_order_wave_by_wave() -> None:
    assert next_of(State(PLAN, 100), log_status()) == Load(SPANS[:2])
    assert next_of(State(PLAN, 100, {SPANS[0]: 110, SPANS[2]: 110}), log_status()) == Load((SPANS[1], SPANS[3]))


def test_uneven_spans_read_only_their_missing_changes() -> None:
    loaded = dict(zip(SPANS, (110, 110, 140, 160), strict=True))
    action = next_of(State(PLAN, 100, loaded), log_status())
    assert isinstance(action, Apply) and action.slices is not None
    assert (action.step.after, action.step.upto) == (100, 150)
    assert [(each.after, each.upto) for each in action.slices] == [(110, 150), (110, 150), (140, 150)]
    action = next_of(State(PLAN, 150, {SPANS[3]: 160}), log_status())
    assert isinstance(action, Apply) and action.slices is not None
    assert [(each.after, each.upto) for each in action.slices] == [(150, 200)] * 3 + [(160, 200)]


def test_spans_loaded_beyond_a_step_read_no_changes_for_it() -> None:
    loaded = dict.fromkeys(SPANS, 180)
    action = next_of(State(PLAN, 100, loaded), log_status())
    assert isinstance(action, Apply) and (action.step.upto, action.slices) == (180, ())


def test_even_spans_are_applied_up_to_the_latest_offset_then_the_sink_waits() -> None:
    action = next_of(State(PLAN, 170), log_status())
    assert isinstance(action, Apply) and action.slices is None
    assert (action.step.after, action.step.upto) == (170, 200)
    assert next_of(State(PLAN, 200), log_status()) == Wait(200)


@pytest.mark.parametrize("loaded", [{}, dict.fromkeys(SPANS, 150)])
def test_new_log_generation_begins_a_new_snapshot(loaded: dict[Span, int]) -> None:
    assert next_of(State(PLAN, 100, loaded), log_status(generation="g2")) == Begin("log_generation_changed")


def test_log_horizon_beyond_the_needed_offset_begins_a_new_snapshot() -> None:
    assert next_of(State(PLAN, 150), log_status(horizon=151)) != Begin("wal_horizon_exceeded")
    assert next_of(State(PLAN, 150), log_status(horizon=152)) == Begin("wal_horizon_exceeded")
    # Nothing is loaded: nothing is needed. What is loaded needs the changes after its own version.
    assert next_of(State(PLAN, 100), log_status(horizon=150)) == Load(SPANS[:2])
    assert next_of(State(PLAN, 100, {SPANS[0]: 149}), log_status(horizon=150)) == Load(SPANS[1:3])
    assert next_of(State(PLAN, 100, {SPANS[0]: 148}), log_status(horizon=150)) == Begin("wal_horizon_exceeded")


def test_table_without_newer_changes_waits_while_the_log_grows() -> None:
    assert next_of(State(PLAN, 150), log_status(table_latest=150, latest=100_000)) == Wait(150)
    action = next_of(State(PLAN, 150), log_status(table_latest=151, latest=100_000))
    assert isinstance(action, Apply) and action.slices is None


def test_spans_without_newer_changes_are_not_read_again() -> None:
    loaded = dict(zip(SPANS, (110, 110, 140, 160), strict=True))
    action = next_of(State(PLAN, 100, loaded), log_status(table_latest=140), step=100)
    assert isinstance(action, Apply) and action.slices is not None
    assert [(each.after, each.upto) for each in action.slices] == [(110, 200), (110, 200)]


@pytest.mark.parametrize(("horizon", "offset", "is_moved"), [(1, 101, False), (101, 151, False), (101, 149, True)])
def test_sink_of_a_quiet_table_takes_an_empty_step_when_it_nears_the_horizon(
    horizon: int, offset: int, is_moved: bool
) -> None:
    action = next_of(State(PLAN, offset), log_status(horizon=horizon, table_latest=10), step=1000)
    empty = Apply(Step("p1", "g1", offset, 200), ())
    assert action == (empty if is_moved else Wait(offset))


def test_evicted_changes_of_other_tables_make_no_new_snapshot_necessary() -> None:
    assert next_of(State(PLAN, 150), log_status(horizon=190, table_latest=150), step=1000) == Apply(
        Step("p1", "g1", 150, 200), ()
    )
    assert next_of(State(PLAN, 150), log_status(horizon=190, table_latest=151)) == Begin("wal_horizon_exceeded")


def test_changed_schema_evolves_is_pinned_or_refused_by_policy() -> None:
    state, log = State(PLAN, 150), log_status(version=4, schema_changed_at=180)
    action = next_of(state, log)
    assert isinstance(action, Apply) and action.step.upto == 179
    assert next_of(State(PLAN, 179), log) == Evolve()
    assert next_of(state, log_status(version=4)) == Evolve()
    pinned = next_of(state, log, policy="pin")
    assert isinstance(pinned, Apply) and pinned.step.upto == 200
    lacking = replace(log, changed_to=replace(TABLE, version=4))  # a column that it is pinned to
    pinned = next_of(state, lacking, policy="pin")
    assert isinstance(pinned, Apply) and pinned.step.upto == 179
    assert next_of(State(PLAN, 179), lacking, policy="pin") == Evolve()
    with pytest.raises(SchemaChanged):
        next_of(state, log, policy="fail")
    assert next_of(state, log_status(version=4, schema_changed_at=180, resnapshot=True)) == Begin("schema_changed")


def test_schema_change_during_a_snapshot_begins_a_new_snapshot() -> None:
    assert next_of(State(PLAN, 100, {SPANS[0]: 120}), log_status(version=4)) == Begin("schema_changed")


def test_spans_loaded_after_a_schema_change_begin_a_new_snapshot() -> None:
    log = log_status(version=4, schema_changed_at=130)
    assert next_of(State(PLAN, 100, dict.fromkeys(SPANS, 130)), log) == Begin("schema_changed")
    assert isinstance(next_of(State(PLAN, 100, dict.fromkeys(SPANS, 120)), log), Apply)
    assert isinstance(next_of(State(PLAN, 100, dict.fromkeys(SPANS, 130)), log, policy="pin"), Apply)


def test_schema_change_during_a_snapshot_is_refused_under_policy_fail() -> None:
    with pytest.raises(SchemaChanged):
        next_of(State(PLAN, 100), log_status(version=4), policy="fail")


def test_random_stage_decisions_bring_all_spans_to_one_offset_and_lose_nothing() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        state: State | None = None
        latest, reads = 100, {span: [] for span in SPANS}  # type: ignore[var-annotated]
        for _ in range(60):
            latest += chance.randrange(40)
            action = next_of(state, log_status(latest=latest), step=30)
            if isinstance(action, Begin):
                state = State(replace(PLAN, offset=latest), latest)
            elif isinstance(action, Load):
                assert state is not None
                for span in action.spans:
                    reads[span] = [latest]
                state = replace(state, loaded={**state.loaded, **dict.fromkeys(action.spans, latest)})
            elif isinstance(action, Apply):
                assert state is not None and check(state, action.step) == action.step
                for span in SPANS:
                    mine = [each for each in action.slices or () if each.span == span]
                    if action.slices is None:
                        reads[span].append((action.step.after, action.step.upto))
                    reads[span] += [(each.after, each.upto) for each in mine]
                upto = action.step.upto
                left = {span: version for span, version in state.loaded.items() if version > upto}
                state = State(state.plan, upto, left)
        assert state is not None and state.is_even, seed
        for read in reads.values():
            at = read[0]
            for after, upto in read[1:]:
                assert after == at, (seed, read)
                at = upto
            assert at == state.offset, (seed, read)


def test_step_is_applied_cut_skipped_or_refused_by_the_offset_of_the_sink() -> None:
    state, step = State(PLAN, 150), Step("p1", "g1", 150, 170)
    assert check(state, step) == step
    assert check(state, replace(step, after=120)) == step, "what it has is cut off"
    assert check(state, replace(step, after=120, upto=150)) is None
    with pytest.raises(SinkGap):
        check(state, replace(step, after=151))
    with pytest.raises(SinkGap, match="3 spans"):
        check(State(PLAN, 100, {SPANS[0]: 110}), replace(step, after=100))
    for other in (
        None,
        replace(state, plan=replace(PLAN, id="p2")),
        replace(state, plan=replace(PLAN, generation="g")),
    ):
        with pytest.raises(SinkFenced):
            check(other, step)
    mend = replace(step, upto=150, repair=True)
    assert check(state, mend) == mend
    with pytest.raises(SinkFenced):
        check(replace(state, offset=160), mend)


def test_lowest_needed_offset_is_the_lowest_of_the_loaded_spans() -> None:
    assert lowest(State(PLAN, 100)) is None
    assert lowest(State(PLAN, 100, {SPANS[0]: 120, SPANS[1]: 110})) == 110
    assert lowest(State(PLAN, 150, {SPANS[0]: 160})) == 150


def test_child_ranges_inherit_stage_version_and_key() -> None:
    state = State(PLAN, 100, {SPANS[0]: 110, SPANS[1]: 120})
    whole = span_progress(state, Span.all())
    assert (whole.stage, whole.version, whole.last_key) == ("snapshot", 110, SPANS[1].end)
    left, middle, right = (span_progress(state, span) for span in spans_at(15, 25))
    assert (left.stage, left.last_offset) == ("log", 110)
    assert (middle.stage, middle.last_key) == ("snapshot", encode_key((20,)))
    assert (right.stage, right.last_key) == ("snapshot", encode_key((25,)))
    live = State(PLAN, 300)
    assert {span_progress(live, span).last_offset for span in spans_at(5, 6, 7)} == {300}


def test_random_ranges_report_exactly_the_missing_keys() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        spans = spans_at(*sorted(chance.sample(range(100), chance.randrange(1, 6))))
        plan = replace(PLAN, spans=spans)
        done = chance.randrange(len(spans) + 1)  # loaded in order, as waves do
        state = State(plan, 100, dict.fromkeys(spans[:done], 110))
        missing = {key for key in range(100) for span in state.missing if span.contains(encode_key((key,)))}
        told = set()
        for span in spans_at(*sorted(chance.sample(range(100), chance.randrange(0, 6)))):
            found = span_progress(state, span)
            if found.stage != "log":
                told |= {
                    k for k in range(100) if span.contains(encode_key((k,))) and encode_key((k,)) >= found.last_key
                }
        assert told == missing, seed
