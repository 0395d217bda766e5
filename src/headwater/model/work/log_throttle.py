"""Throttling of repeated log messages: the first at once, then at most one a minute, with a count."""

from __future__ import annotations

SECONDS = 60.0
MOST = 64  # kinds of messages remembered


class LogThrottle:
    """Throttles messages by `kind`. Not thread-safe."""

    def __init__(self) -> None:
        self._logged: dict[str, tuple[float, int]] = {}  # by kind: time of the last message, and how many were dropped

    def again(self, kind: str, now: float) -> int | None:
        """Count a message of `kind`: return None if it must be dropped, else how many were dropped since the last."""
        at, left_out = self._logged.pop(kind, (None, 0))
        if at is not None and now - at < SECONDS:
            self._logged[kind] = at, left_out + 1
            return None
        self._logged[kind] = now, 0
        if len(self._logged) > MOST:
            del self._logged[next(iter(self._logged))]
        return left_out


def counted(text: str, left_out: int) -> str:
    """Return `text` with the number of messages that were dropped."""
    return text if not left_out else f"{text} (and {left_out} more since the last such message)"
