"""What is worth a line in the server's log again: the first time, and then at most one a minute, with a count. Pure."""

from __future__ import annotations

SECONDS = 60.0
MOST = 64  # kinds that are remembered


class Repeats:
    """Of one speaker, who names each thing by a `kind`. Not for several threads."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._said: dict[str, tuple[float, int]] = {}  # when a kind was last said, and how often it came since

    def again(self, kind: str, now: float) -> int | None:
        """None: say nothing. Else how often the same was left out before."""
        at, left_out = self._said.pop(kind, (None, 0))
        if at is not None and now - at < self._seconds:
            self._said[kind] = at, left_out + 1
            return None
        self._said[kind] = now, 0
        if len(self._said) > MOST:
            del self._said[next(iter(self._said))]
        return left_out


def counted(text: str, left_out: int) -> str:
    """`text`, and how often it was not said."""
    return text if not left_out else f"{text} (and {left_out} more since it was last said)"
