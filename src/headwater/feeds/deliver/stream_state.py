"""The states of a stream and the transitions between them. Pure: no I/O and no clock.

    Snapshotting ──all rows sent──> CatchingUp ──joined its group──> Live
                                        ^                             │ too slow, or the group ended
                                        └─────────────────────────────┘

`Paused` holds any of these three until the subscription is resumed. `Ended` is final.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from headwater.errors import HeadwaterError
from headwater.feeds.deliver.end_reason import COMPLETE, RESNAPSHOT_REQUIRED, STOPPING, EndReason


class Snapshotting(msgspec.Struct, frozen=True):
    """The stream sends the rows of a snapshot."""


class CatchingUp(msgspec.Struct, frozen=True):
    """The stream reads the log."""

    target: int | None = None  # the offset at which it has caught up; None once that was reported


class Live(msgspec.Struct):
    """The stream takes the frames that its group publishes."""

    seen: int  # frames of the group that it has taken; the stream counts it up
    epoch: int  # of the hub when it joined
    target: int | None = None


Delivering = Snapshotting | CatchingUp | Live


class Paused(msgspec.Struct, frozen=True):
    """The subscription is paused: nothing is delivered."""

    held: Delivering


class Ended(msgspec.Struct, frozen=True):
    """Nothing follows."""

    ending: EndReason


State = Delivering | Paused | Ended


class Event(msgspec.Struct, frozen=True):
    """Base class of the events that may change the state."""


class SnapshotSent(Event, frozen=True):
    """The last row was sent; the log is read next, up to `target` at least."""

    target: int


class Joined(Event, frozen=True):
    """The group holds every frame after the stream's cursor."""

    seen: int
    epoch: int


class FellBehind(Event, frozen=True):
    """The group cannot give the next frame. With `target`, changes were missed and catching up is reported again."""

    target: int | None = None


class Skipped(Event, frozen=True):
    """The subscriber acknowledged changes that the stream had not sent yet."""


class Advanced(Event, frozen=True):
    """Everything up to `cursor` was sent."""

    cursor: int


class PauseChanged(Event, frozen=True):
    """The subscription was paused or resumed."""

    paused: bool


class Completed(Event, frozen=True):
    """The last offset that the reader asked for was sent."""


class Closed(Event, frozen=True):
    """The reader left, its subscription was closed, or it was refused."""

    code: str
    message: str


class HistoryLost(Event, frozen=True):
    """The log no longer holds the changes after the cursor."""

    reason: str


class Failed(Event, frozen=True):
    """An error ends the stream."""

    error: HeadwaterError


class Stopped(Event, frozen=True):
    """The server is stopping."""


class Action(Enum):
    """A frame that the stream sends on a transition."""

    SEND_CAUGHT_UP = auto()
    SEND_LAST_CHECKPOINT = auto()
    SEND_FAREWELL = auto()
    SEND_RESNAPSHOT = auto()
    SEND_FAILED = auto()


def next_state(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Return the state after `event` and what to send. An event that a state does not know leaves it as it is."""
    if isinstance(state, Ended):
        return state, ()
    match event:
        case Completed():
            return Ended(EndReason(COMPLETE, "everything asked for was sent")), ()
        case Closed(code, message):
            return Ended(EndReason(code, message)), ()
        case HistoryLost(reason):
            return Ended(EndReason(RESNAPSHOT_REQUIRED, reason)), (Action.SEND_RESNAPSHOT,)
        case Failed(error):
            return Ended(EndReason(error.code, error.message, error)), (Action.SEND_FAILED,)
        case Stopped():
            ending = EndReason(STOPPING, "the server is stopping")
            return Ended(ending), (Action.SEND_LAST_CHECKPOINT, Action.SEND_FAREWELL)
        case PauseChanged(paused):
            held = state.held if isinstance(state, Paused) else state
            return (Paused(held) if paused else held), ()
    if isinstance(state, Paused):
        held, actions = _next_delivering(state.held, event)
        return Paused(held), actions
    return _next_delivering(state, event)


def _next_delivering(state: Delivering, event: Event) -> tuple[Delivering, tuple[Action, ...]]:
    match state, event:
        case Snapshotting(), SnapshotSent(target):
            return CatchingUp(target), ()
        case CatchingUp(target), Joined(seen, epoch):
            return Live(seen, epoch, target), ()
        case Live(_, _, target), FellBehind(missed):
            return CatchingUp(missed if target is None else target), ()
        case ((CatchingUp(target) | Live(_, _, target)), Skipped()):
            return CatchingUp(target), ()
        case CatchingUp(target), Advanced(cursor) if target is not None and cursor >= target:
            return CatchingUp(), (Action.SEND_CAUGHT_UP,)
        case Live(seen, epoch, target), Advanced(cursor) if target is not None and cursor >= target:
            return Live(seen, epoch), (Action.SEND_CAUGHT_UP,)
    return state, ()
