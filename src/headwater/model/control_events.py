"""Names of control events, the frames of a stream that are neither changes nor rows.

The server, the clients, the CLI and the gateway import them from here; the JavaScript constants are generated.
"""

from __future__ import annotations

from enum import StrEnum


class ControlEvent(StrEnum):
    """The `event` of a frame that is neither a change nor a row."""

    CAUGHT_UP = "caught_up"
    CHECKPOINT = "checkpoint"
    BACKPRESSURE = "backpressure"
    RESNAPSHOT = "resnapshot"
    SNAPSHOT_END = "snapshot_end"
    SNAPSHOT_RESTART = "snapshot_restart"
    FAILED = "failed"


LAST_EVENTS = frozenset({ControlEvent.RESNAPSHOT, ControlEvent.FAILED})  # the stream ends after one of these
# These change the meaning of the rows before them: a client reports them even if the application did not request them.
ROW_EVENTS = frozenset({ControlEvent.SNAPSHOT_END, ControlEvent.SNAPSHOT_RESTART})
