"""Limits on responses that are open concurrently, in total and per caller; for owners only in total."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from headwater.errors import LimitExceeded
from headwater.model.principal import OWNER
from headwater.model.work.usage import Usage
from headwater.serve.call import Call
from headwater.serve.limits.limits import identity
from headwater.serve.limits.stream_limits import client_of


class Shares:
    """Counts the open responses of one kind, which `what` names in errors. Not thread-safe."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._open: Usage[Hashable] = Usage()  # by caller

    @contextmanager
    def take(self, call: Call, most: int, share: int) -> Iterator[None]:
        """Count a response while it is open. Raises LimitExceeded if `most` are open, or `share` of its caller."""
        caller, hint = identity(call.who, client_of(call.scope)), "Retry in a moment, or open fewer."
        if self._open.total >= most:
            raise LimitExceeded(f"{most} {self._what} are open, the limit of this server", hint=hint)
        if self._open[caller] >= share and call.who.role != OWNER:
            raise LimitExceeded(
                f"{share} {self._what} of {call.who.name!r} are open, the limit of one caller", hint=hint
            )
        with self._open.held(caller):
            yield
