"""A group of streams with the same view and framing, and the frames recently published for them."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import NamedTuple, Protocol

from headwater.errors import HeadwaterError
from headwater.feeds.formats.frame import Frame
from headwater.feeds.groups.log_reader import View

PIECE = 256 << 10  # bytes that one stream takes at a time
JOINED = 4  # positions of slow streams for which joined frames are cached, too


class Sleeper(Protocol):
    """A stream or poll that waits for published frames."""

    def wake(self) -> None:
        """Check for published frames again."""


class JoinedFrames(NamedTuple):
    """Joined frames for one stream."""

    piece: bytes
    seen: int  # frames of the group that the stream has received, these included
    offset: int  # the offset of the last frame


class Group:
    """The streams with the same view and framing."""

    def __init__(self, view: View, frame: Frame, since: int) -> None:
        self.view, self.frame = view, frame
        self.since = since  # everything published after this offset is still in memory
        self.members = 0
        self.published = 0  # frames ever published
        self.failed: HeadwaterError | None = None  # the error because of which the filter cannot be applied any more
        self.is_live = True  # the hub publishes to this group; otherwise its members read the log on their own
        self.is_suspended = False  # the members read the log and join again when they have caught up
        self.waiting: set[Sleeper] = set()
        self._frames: deque[tuple[int, bytes]] = deque()
        self._taken = 0  # frames that the member furthest ahead has passed
        self._joined: dict[int, JoinedFrames] = {}  # by frames seen, where several streams may take the same frames

    def publish(self, frames: list[tuple[int, bytes]]) -> None:
        """Add frames and wake the waiting members."""
        self._frames.extend(frames)
        self.published += len(frames)
        self._joined.clear()
        self.wake()

    def wake(self) -> None:
        """Wake every waiting member."""
        waiting, self.waiting = self.waiting, set()
        for sleeper in waiting:
            sleeper.wake()

    def fail(self, error: HeadwaterError) -> None:
        """End the feeds of this group with `error`."""
        self.failed, self.is_live = error, False
        self.wake()

    def skip(self, upto: int) -> int:
        """Drop all frames up to `upto`, so that members read the log; return the bytes dropped."""
        dropped = self.clear()
        self.published += 1  # stands for the skipped frames, which no member has seen
        self.since = max(self.since, upto)
        self.wake()
        return dropped

    @property
    def is_unread(self) -> bool:
        """Whether a frame was dropped before any member took it, so that all members must read the log."""
        return self.published - len(self._frames) > self._taken

    def clear(self) -> int:
        """Drop all frames and return their size."""
        dropped = sum(len(frame) for _, frame in self._frames)
        self._frames.clear()
        self._joined.clear()
        return dropped

    def forget_oldest(self) -> int:
        """Drop the oldest frame, if there is one; return its size."""
        if not self._frames:
            return 0  # the frame was skipped
        offset, frame = self._frames.popleft()
        # `since` never goes back: a frame older than a loss of continuity does not cover the changes missed then.
        self.since = max(self.since, offset)
        self._joined.clear()
        return len(frame)

    def seek(self, cursor: int) -> int | None:
        """Return how many published frames are at or before `cursor`; None if a stream there must read the log."""
        if cursor < self.since:
            return None
        ahead = sum(1 for _ in takewhile(lambda entry: entry[0] > cursor, reversed(self._frames)))
        seen = self.published - ahead
        self._taken = max(self._taken, seen)
        return seen

    def offset_after(self, seen: int) -> int:
        """Return the offset of the frame after the first `seen` frames; that frame must be in memory."""
        return self._frames[seen - self.published][0]

    def holds(self, seen: int) -> bool:
        """Return whether everything published after `seen` frames is still in memory."""
        return self.published - seen <= len(self._frames)

    def take(self, seen: int) -> JoinedFrames | None:
        """Return the frames after the first `seen`, joined to about PIECE bytes; None if some were dropped."""
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

    def _join(self, seen: int, skipped: int) -> JoinedFrames:
        parts, size, offset = [], 0, 0
        for place in range(skipped, len(self._frames)):
            offset, frame = self._frames[place]
            parts.append(frame)
            size += len(frame)
            if size >= PIECE:
                break
        return JoinedFrames(b"".join(parts), seen + len(parts), offset)
