"""Group: the streams that see the same in the same framing, and the frames that were published for them lately."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import NamedTuple, Protocol

from headwater.errors import HeadwaterError
from headwater.feeds.formats.frame import Frame
from headwater.feeds.groups.log_reader import View

PIECE = 256 << 10  # bytes that one stream is handed at a time
JOINED = 4  # places of slow streams for which joined frames are kept besides


class Sleeper(Protocol):
    """Whoever waits for something to be published."""

    def wake(self) -> None:
        """Look again."""
        ...


class Taken(NamedTuple):
    """Frames for one stream."""

    piece: bytes
    seen: int  # how many frames of the group it has now
    offset: int  # of the last of them


class Group:
    """The streams that see the same in the same framing."""

    def __init__(self, view: View, frame: Frame, since: int) -> None:
        self.view, self.frame = view, frame
        self.since = since  # everything published after this offset is still held
        self.members = 0
        self.published = 0  # frames ever
        self.failed: HeadwaterError | None = None  # the filter cannot be applied any more
        self.is_live = True  # what passes is published here; else its members read the log by themselves
        self.is_dismissed = False  # its members are to read the log, and to come back when they have caught up
        self.waiting: set[Sleeper] = set()
        self._frames: deque[tuple[int, bytes]] = deque()
        self._taken = 0  # frames that the member furthest ahead has passed
        self._joined: dict[int, Taken] = {}  # by what a stream has seen, where several streams may take the same

    def publish(self, frames: list[tuple[int, bytes]]) -> None:
        """Add frames and wake who waits."""
        self._frames.extend(frames)
        self.published += len(frames)
        self._joined.clear()
        self.wake()

    def wake(self) -> None:
        """Let every member look."""
        waiting, self.waiting = self.waiting, set()
        for sleeper in waiting:
            sleeper.wake()

    def fail(self, error: HeadwaterError) -> None:
        """End the feeds of this group."""
        self.failed, self.is_live = error, False
        self.wake()

    def skip(self, upto: int) -> int:
        """Hold nothing at or below `upto`, so that members read the log; return the bytes dropped."""
        dropped = self.clear()
        self.published += 1  # no member has seen what was skipped
        self.since = max(self.since, upto)
        self.wake()
        return dropped

    @property
    def is_unread(self) -> bool:
        """Whether a frame was dropped before any member had taken it: then all of them must read the log."""
        return self.published - len(self._frames) > self._taken

    def clear(self) -> int:
        """Drop all frames, of a group to which nothing more is published; return their bytes."""
        dropped = sum(len(frame) for _, frame in self._frames)
        self._frames.clear()
        self._joined.clear()
        return dropped

    def forget_oldest(self) -> int:
        """Drop one frame, if there is one; returns its bytes."""
        if not self._frames:
            return 0  # it was skipped
        offset, frame = self._frames.popleft()
        # Never back: a frame of before continuity broke says nothing of what was passed over since.
        self.since = max(self.since, offset)
        self._joined.clear()
        return len(frame)

    def seek(self, cursor: int) -> int | None:
        """How many frames a stream at `cursor` has seen; None when it must read the log first."""
        if cursor < self.since:
            return None
        ahead = sum(1 for _ in takewhile(lambda held: held[0] > cursor, reversed(self._frames)))
        seen = self.published - ahead
        self._taken = max(self._taken, seen)
        return seen

    def offset_after(self, seen: int) -> int:
        """The offset of the frame that follows `seen` frames; it is there."""
        return self._frames[seen - self.published][0]

    def holds(self, seen: int) -> bool:
        """Whether everything published after `seen` frames is still held."""
        return self.published - seen <= len(self._frames)

    def take(self, seen: int) -> Taken | None:
        """What follows `seen` frames, at most a piece of it; None when some of that is gone."""
        found = self._joined.get(seen)
        if found is None:
            if not self.holds(seen):
                return None
            found = self._join(seen, len(self._frames) - (self.published - seen))
            if self.members > 1:
                if len(self._joined) >= JOINED:
                    self._joined.clear()
                self._joined[seen] = found
            self._taken = max(self._taken, found.seen)
        return found

    def _join(self, seen: int, skipped: int) -> Taken:
        parts, size, offset = [], 0, 0
        for place in range(skipped, len(self._frames)):
            offset, frame = self._frames[place]
            parts.append(frame)
            size += len(frame)
            if size >= PIECE:
                break
        return Taken(b"".join(parts), seen + len(parts), offset)
