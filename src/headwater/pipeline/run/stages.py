"""The next action of a pipeline for one table, decided from the state of the sink and the log. Pure.

nothing ──begin──> spans missing ──load──> uneven ──apply──> even ──apply──> … live
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from headwater.errors import SchemaChanged
from headwater.model.keys.key import Span
from headwater.pipeline.sinks.sink import State, Step
from headwater.pipeline.spark.offsets import last_change, nears_horizon
from headwater.pipeline.spark.options import FAIL, PIN, LogPiece

if TYPE_CHECKING:
    from headwater.client.responses import Described


FIRST = "first"
LOG_GENERATION_CHANGED = "log_generation_changed"
WAL_HORIZON_EXCEEDED = "wal_horizon_exceeded"
SCHEMA_CHANGED = "schema_changed"


class Begin(msgspec.Struct, frozen=True):
    """The action of taking a snapshot: the first, or because the log cannot bring the sink up to date."""

    reason: str


class Load(msgspec.Struct, frozen=True):
    """The action of reading the next missing spans."""

    spans: tuple[Span, ...]


class Apply(msgspec.Struct, frozen=True):
    """The action of applying a step; `slices` are the changes to read, None means all changes of the step."""

    step: Step
    slices: tuple[LogPiece, ...] | None = None


class Evolve(msgspec.Struct, frozen=True):
    """The action of taking the current shape of the table, which the following changes have."""


class Wait(msgspec.Struct, frozen=True):
    """The action of waiting for a change of the table after this offset; all earlier ones are applied."""

    after: int


Action = Begin | Load | Apply | Evolve | Wait


def decide(state: State | None, status: Described, *, shape: int, policy: str, wave: int) -> Action:
    """Return the next action. `status` describes the log, requested with the sink's offset and `shape`.

    `shape` is the table version of the sink's columns, `wave` the number of spans read at a time.
    """
    if state is None:
        return Begin(FIRST)
    if lost := why_lost(state, status):
        return Begin(lost)
    is_same = status.table.version == shape
    if policy == FAIL and not is_same:
        raise SchemaChanged(
            f"table {status.table.name!r} has another shape since offset {status.schema_changed_at or state.offset}",
            hint="Set schema to `evolve` or `pin`, or reset the pipeline to take a new snapshot.",
        )
    if missing := state.missing:
        return Load(tuple(missing[:wave])) if is_same else Begin(SCHEMA_CHANGED)
    if is_same or (policy == PIN and status.changed_to is None):  # otherwise a pinned column was dropped
        is_done = state.is_even and last_change(status) <= state.offset
        is_due = is_done and nears_horizon(state.offset, status)
        return Wait(state.offset) if is_done and not is_due else _apply(state, status, status.latest)
    if status.resnapshot or _was_read_after(state, status.schema_changed_at):
        return Begin(SCHEMA_CHANGED)
    if status.schema_changed_at is None or status.schema_changed_at <= state.offset + 1:
        return Evolve()
    return _apply(state, status, status.schema_changed_at - 1)


def why_lost(state: State, status: Described) -> str:
    """Return why the log cannot bring the sink up to date; "" if it can."""
    if state.plan.generation != status.generation:
        return LOG_GENERATION_CHANGED
    needed = lowest(state)
    is_evicted = needed is not None and needed + 1 < status.horizon and needed < last_change(status)
    return WAL_HORIZON_EXCEEDED if is_evicted else ""


def lowest(state: State) -> int | None:
    """Return the offset after which the log is needed; None while nothing is loaded."""
    missing = set(state.missing)
    there = [state.reached(span) for span in state.plan.spans if span not in missing]
    return min(there, default=None)


def _was_read_after(state: State, changed_at: int | None) -> bool:
    """Return whether a span was read after that change of the shape, and thus without its new columns."""
    return changed_at is not None and any(version >= changed_at for version in state.loaded.values())


def _apply(state: State, status: Described, latest: int) -> Apply:
    upto = min(latest, status.step_upto or latest)
    if not state.is_even:  # spans may have been read at higher offsets than the step would reach
        upto = max(upto, min(state.reached(span) for span in state.plan.spans))
    step = Step(state.plan.id, state.plan.generation, state.offset, max(upto, state.offset))
    last = min(last_change(status), step.upto)
    if state.is_even:
        return Apply(step, None if state.offset < last else ())
    slices = [LogPiece(state.reached(span), step.upto, span) for span in state.plan.spans]
    return Apply(step, tuple(each for each in slices if each.after < last))


class SpanProgress(msgspec.Struct, frozen=True):
    """The progress of one range of the server, derived from the state of the sink."""

    stage: str  # register, snapshot, log
    version: int  # lowest version at which its keys were read
    last_key: bytes  # keys before this one are loaded
    last_offset: int


def span_progress(state: State, span: Span) -> SpanProgress:
    """Return the progress of `span`, any interval of keys. Ranges split and merge; the sink's spans stay as planned.

    A child range thus has the stage, the version and the last key of its parent, limited to its own keys.
    """
    inside = [each for each in state.plan.spans if each.overlaps(span)]
    missing = set(state.missing)
    loaded = list(takewhile(lambda each: each not in missing, inside))
    versions = [state.loaded.get(each, state.offset) for each in inside if each not in missing]
    if not missing.intersection(inside):
        reached = min((state.reached(each) for each in inside), default=state.offset)
        return SpanProgress("log", min(versions, default=state.plan.offset), b"", reached)
    last = max(span.start, loaded[-1].end or b"") if loaded else span.start
    stage = "snapshot" if len(missing) < len(state.plan.spans) else "register"
    return SpanProgress(stage, min(versions, default=state.plan.offset), last, 0)
