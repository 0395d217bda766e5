"""Task and RangeProgress: the tables that a pipeline carries and their progress, as pure values that only advance.

    register ──> snapshot ──> log        failed, with a reason, from anywhere

Both are copies of the sink's state (`stages.span_progress`): splits and merges of ranges on the server skip no key.
"""

from __future__ import annotations

import msgspec

from headwater.model.keys.key import Span

REGISTER, SNAPSHOT, LOG, FAILED = STAGES = ("register", "snapshot", "log", "failed")


class Task(msgspec.Struct, frozen=True):
    """One table of one pipeline, as stored in the meta store."""

    name: str  # of the pipeline
    db: str
    table: str
    cluster_id: int = 0
    server: str = ""
    sink: str = ""  # for output, without secrets
    cancelled: bool = False
    resnapshot: bool = False  # whether a new snapshot was requested
    owner: str = ""
    owner_left_ms: int = 0  # remaining time of the owner's lease; 0 or less: not held
    error: str = ""
    verified_through: int | None = None
    updated_ms: int = 0

    @property
    def is_owned(self) -> bool:
        """Return whether a pipeline server works on the task now."""
        return bool(self.owner) and self.owner_left_ms > 0

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the identity of the task: pipeline, database and table."""
        return self.name, self.db, self.table

    def __str__(self) -> str:
        return f"{self.name}: {self.db}.{self.table}"


class RangeProgress(msgspec.Struct, frozen=True):
    """The progress of one range of a table."""

    range_id: int
    epoch: int
    span: Span
    stage: str = REGISTER
    init_version: int = 0  # the offset when the range was registered
    version: int = 0  # the offset at which its rows are read
    last_key: bytes = b""  # keys before this key are loaded
    last_offset: int = 0  # changes up to this offset are applied
    reason: str = ""  # why the range failed
    rows: int = 0
    rows_estimate: int = 0

    @property
    def is_loaded(self) -> bool:
        """Return whether all rows of the snapshot are loaded."""
        return self.stage == LOG or (self.span.end is not None and self.last_key >= self.span.end)
