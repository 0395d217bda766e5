"""Task and RangeProgress: what a pipeline is to carry and how far it is, as pure values that only go forward.

    register ──> snapshot ──> log        failed, with a reason, from anywhere

They are copies of what the sink tells (`stages.standing`): whatever the server splits or merges, no key is skipped.
"""

from __future__ import annotations

import msgspec

from headwater.model.keys.key import Span

REGISTER, SNAPSHOT, LOG, FAILED = STAGES = ("register", "snapshot", "log", "failed")


class Task(msgspec.Struct, frozen=True):
    """One table of one pipeline, as the meta store knows it."""

    name: str  # of the pipeline
    db: str
    table: str
    cluster_id: int = 0
    server: str = ""
    sink: str = ""  # for people: no secrets
    cancelled: bool = False
    resnapshot: bool = False  # somebody asked to begin anew
    owner: str = ""
    owner_left_ms: int = 0  # what is left of the owner's lease; 0 or less: nobody holds it
    error: str = ""
    verified_through: int | None = None
    updated_ms: int = 0

    @property
    def is_owned(self) -> bool:
        """Whether a pipeline server works on it now."""
        return bool(self.owner) and self.owner_left_ms > 0

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from others, whatever else is known of it."""
        return self.name, self.db, self.table

    def __str__(self) -> str:
        return f"{self.name}: {self.db}.{self.table}"


class RangeProgress(msgspec.Struct, frozen=True):
    """How far one range of a table is."""

    range_id: int
    epoch: int
    span: Span
    stage: str = REGISTER
    init_version: int = 0  # the offset when it was registered
    version: int = 0  # the offset its rows are read at
    last_key: bytes = b""  # keys before it are loaded
    last_offset: int = 0  # changes up to here are applied
    reason: str = ""  # why it failed
    rows: int = 0
    rows_estimate: int = 0

    @property
    def is_loaded(self) -> bool:
        """Whether all rows of the snapshot are in."""
        return self.stage == LOG or (self.span.end is not None and self.last_key >= self.span.end)
