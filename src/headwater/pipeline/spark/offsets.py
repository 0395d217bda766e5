"""Offsets of a stream: its start, the end of the next batch, and the conditions under which it must stop. No I/O.

Spark accepts any answer of a source: an end before the start, a log with evicted changes, rows of another shape.
This module raises an error in those cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from headwater.client.responses import ChangedTables, Described
from headwater.errors import OffsetExpired, PipelineError, SchemaChanged
from headwater.pipeline.spark.options import EVOLVE, FAIL, LogPiece
from headwater.pipeline.transform.schema import TEXT

ROWS_PER_CHANGE = 2  # an update is two rows: before and after
_RESTART_HINT = "Read the table again as a batch, then start the stream with a new checkpoint folder."


class StreamOffset(msgspec.Struct, frozen=True):
    """A position in the log as stored in Spark's checkpoint; `shape` is the table version of the rows read so far."""

    generation: str
    offset: int
    shape: int = 0  # 0: changes of several tables, which have no shape
    types: str = TEXT  # form of decimals, dates and timestamps; checkpoints from before this field hold text

    @classmethod
    def read(cls, stored: dict[str, Any]) -> StreamOffset:
        """Return the position stored in a checkpoint; raise PipelineError if the checkpoint is not ours."""
        try:
            return msgspec.convert(stored, cls)
        except msgspec.ValidationError as error:
            raise PipelineError(
                f"the checkpoint contains no offset of Headwater: {error}",
                hint="It belongs to another source; give this query a checkpoint folder of its own.",
            ) from None

    def to_json(self) -> dict[str, Any]:
        """Return the position as a checkpoint stores it."""
        told = {"generation": self.generation, "offset": self.offset, "shape": self.shape}
        return told if self.types == TEXT else told | {"types": self.types}


class StreamParameters(msgspec.Struct, frozen=True):
    """The fixed parameters of a stream's run: the shape of its rows, the policy, and the limits of a batch."""

    shape: int
    policy: str = EVOLVE
    max_rows: int | None = None
    target: int | None = None  # with availableNow: the end of the log when the run began
    types: str = TEXT
    has_forms: bool = True  # whether a column of the table depends on `types`

    @property
    def max_changes(self) -> int:
        """Return how many changes a batch may have, if rows are limited."""
        return max((self.max_rows or 0) // ROWS_PER_CHANGE, 1)


def check_offset(position: StreamOffset, status: Described) -> None:
    """Raise an error if the log cannot continue after `position`."""
    if position.generation != status.generation:
        raise PipelineError(
            f"the log of {status.db!r} began the new generation {status.generation};"
            f" the offset belongs to generation {position.generation}",
            hint=_RESTART_HINT,
            resnapshot_reason="log_generation_changed",
        )
    if position.offset > status.latest:
        raise PipelineError(
            f"the log ends at offset {status.latest}, before the query's offset {position.offset}",
            hint="Is this the server that the checkpoint was made with? Use the right one, or a new checkpoint folder.",
        )
    if position.offset + 1 < status.horizon:
        raise OffsetExpired(position.offset, status.horizon, status.latest)


def check_types(start: StreamOffset, reading: StreamParameters) -> None:
    """Raise SchemaChanged if the query's checkpoint was made with the other form of decimals, dates and timestamps."""
    if start.types != reading.types and reading.has_forms:
        raise SchemaChanged(
            f"the query read its columns with types = {start.types} so far, and now with types = {reading.types}",
            hint=f"Set option types to {start.types} to go on with this checkpoint, or give the query a new one.",
        )


def next_offset(start: StreamOffset, status: Described, reading: StreamParameters) -> StreamOffset:
    """Return the end of the next batch; `start` itself if there is nothing to read."""
    check_types(start, reading)
    check_offset(start, status)
    upto = status.latest if reading.target is None else min(status.latest, reading.target)
    if reading.shape:
        _check_shape(start, status, reading)
        upto = _before_change(start, status, reading, upto)
        if last_change(status) <= start.offset and not nears_horizon(start.offset, status):
            return start
    if reading.max_rows is not None:  # the server says where the step ends, if it counted the changes of one table
        upto = min(upto, status.step_upto or start.offset + reading.max_changes)
    if upto <= start.offset:
        return start
    return StreamOffset(start.generation, upto, reading.shape, reading.types)


def last_change(status: Described) -> int:
    """Return the offset of the table's last change up to `latest`, which may be less than the server said."""
    return min(status.table_latest, status.latest)


def nears_horizon(offset: int, status: Described | ChangedTables) -> bool:
    """Return whether half of the retained changes were made after `offset`, and earlier ones are evicted already.

    Then the reader of a table without changes moves on: its offset should stay readable.
    """
    behind, kept = status.latest - offset, status.latest + 1 - status.horizon
    return status.horizon > 1 and offset < status.latest and 2 * behind > kept


def split_log(after: int, upto: int, size: int) -> Iterator[LogPiece]:
    """Cut (after, upto] into pieces that end at multiples of `size`, so that repeated requests give equal pieces."""
    while after < upto:
        end = min((after // size + 1) * size, upto)
        yield LogPiece(after, end)
        after = end


def _check_shape(start: StreamOffset, status: Described, reading: StreamParameters) -> None:
    name, now = status.table.name, status.table.version
    if reading.policy != EVOLVE and start.shape != reading.shape:
        raise SchemaChanged(
            f"the query read shape {start.shape} of table {name!r} so far, and now shape {reading.shape}",
            hint=f"Set option shape to {start.shape} to keep its columns, or schemaPolicy to evolve.",
        )
    passed = status.schema_changed_at is None and reading.policy == EVOLVE  # changed while the query was starting
    if now != reading.shape and (passed or reading.policy == FAIL):
        raise SchemaChanged(f"table {name!r} has shape {now}, and was read as shape {reading.shape}")


def _before_change(start: StreamOffset, status: Described, reading: StreamParameters, upto: int) -> int:
    """Return `upto`, or the last offset before a change of the shape that the stream must not pass silently."""
    changed_at = status.schema_changed_at
    if changed_at is None or (reading.policy != EVOLVE and not status.resnapshot):
        return upto
    if start.offset + 1 < changed_at:
        return min(upto, changed_at - 1)
    if status.resnapshot:
        raise SchemaChanged(
            f"table {status.table.name!r} was rebuilt at offset {changed_at}: rows may have changed unseen",
            hint=_RESTART_HINT,
            resnapshot_reason="schema_changed",
        )
    raise SchemaChanged(
        f"table {status.table.name!r} has another shape from offset {changed_at} on; everything before is delivered",
        hint="Start the query again with the same checkpoint to go on in the new shape, or set schemaPolicy to pin.",
    )
