"""The transitions of a stream, as a table: every state with every event."""

from itertools import product

import pytest

from headwater.errors import Unauthorized
from headwater.feeds.deliver.end_reason import EndReason
from headwater.feeds.deliver.stream_state import (
    Action,
    Advanced,
    CatchingUp,
    Closed,
    Completed,
    Ended,
    Event,
    Failed,
    FellBehind,
    HistoryLost,
    Joined,
    Live,
    PauseChanged,
    Paused,
    Skipped,
    SnapshotSent,
    Snapshotting,
    State,
    Stopped,
    next_state,
)

ERROR = Unauthorized("the credential was revoked")
REPORTED, BEHIND = CatchingUp(), CatchingUp(target=9)
DELIVERING = (Snapshotting(), REPORTED, BEHIND, Live(3, 1), Live(3, 1, target=9))
STATES: tuple[State, ...] = (*DELIVERING, *(Paused(held) for held in DELIVERING), Ended(EndReason("closed", "left")))
ENDS: dict[Event, tuple[Ended, tuple[Action, ...]]] = {
    Completed(): (Ended(EndReason("complete", "everything asked for was sent")), ()),
    Closed("bad_frame", "no JSON"): (Ended(EndReason("bad_frame", "no JSON")), ()),
    HistoryLost("wal_horizon_exceeded"): (
        Ended(EndReason("resnapshot_required", "wal_horizon_exceeded")),
        (Action.SEND_RESNAPSHOT,),
    ),
    Failed(ERROR): (Ended(EndReason(ERROR.code, ERROR.message, ERROR)), (Action.SEND_FAILED,)),
    Stopped(): (
        Ended(EndReason("stopping", "the server is stopping")),
        (Action.SEND_LAST_CHECKPOINT, Action.SEND_FAREWELL),
    ),
}
OTHERS: tuple[Event, ...] = (
    SnapshotSent(7),
    Joined(5, 2),
    FellBehind(),
    FellBehind(target=8),
    Skipped(),
    Advanced(8),
    Advanced(9),
)
# (state, event) -> (next state, actions); any other pair leaves the state as it is.
MOVES: list[tuple[State, Event, State, tuple[Action, ...]]] = [
    (Snapshotting(), SnapshotSent(7), CatchingUp(7), ()),
    (REPORTED, Joined(5, 2), Live(5, 2), ()),
    (BEHIND, Joined(5, 2), Live(5, 2, target=9), ()),
    (BEHIND, Advanced(9), REPORTED, (Action.SEND_CAUGHT_UP,)),
    (Live(3, 1), FellBehind(), REPORTED, ()),
    (Live(3, 1), FellBehind(target=8), CatchingUp(8), ()),
    (Live(3, 1), Skipped(), REPORTED, ()),
    (Live(3, 1, target=9), FellBehind(), BEHIND, ()),
    (Live(3, 1, target=9), FellBehind(target=8), BEHIND, ()),
    (Live(3, 1, target=9), Skipped(), BEHIND, ()),
    (Live(3, 1, target=9), Advanced(9), Live(3, 1), (Action.SEND_CAUGHT_UP,)),
]


def expected(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    if isinstance(state, Ended):
        return state, ()
    if event in ENDS:
        return ENDS[event]
    held = state.held if isinstance(state, Paused) else state
    if isinstance(event, PauseChanged):
        return Paused(held) if event.paused else held, ()
    after, actions = next(((to, acts) for at, on, to, acts in MOVES if (at, on) == (held, event)), (held, ()))
    assert not isinstance(after, Paused | Ended)
    return Paused(after) if isinstance(state, Paused) else after, actions


EVENTS: tuple[Event, ...] = (*OTHERS, *ENDS, PauseChanged(paused=True), PauseChanged(paused=False))


@pytest.mark.parametrize(("state", "event"), list(product(STATES, EVENTS)), ids=str)
def test_every_state_and_event_leads_to_the_expected_state_and_actions(state: State, event: Event) -> None:
    assert next_state(state, event) == expected(state, event)


def test_moves_table_names_only_known_states_and_events() -> None:
    assert all(at in STATES and on in OTHERS for at, on, _, _ in MOVES)


def test_two_streams_that_join_get_separate_live_states() -> None:
    live, _ = next_state(BEHIND, Joined(5, 2))
    again, _ = next_state(BEHIND, Joined(5, 2))
    assert isinstance(live, Live) and live is not again
