"""Wake-up of the capture thread on a commit: by our own writer, by inotify on the WAL, or by a timeout."""

from __future__ import annotations

import os
import select
import sys
import threading


class Waker:
    """Waiter that wakes when `wake` is called, the WAL is written, or the timeout passes.

    inotify may fire before the commit is complete, so a wake-up is only a hint: the caller checks the file itself,
    and checks again after `timeout` in any case.
    """

    def __init__(self, wal: str) -> None:
        self._wal = wal
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._inotify = _inotify()
        self._watching = False
        self._open_or_closed = threading.Lock()  # guards _closed: the kernel may reuse a closed descriptor's number
        self._closed = False

    def wait(self, timeout: float) -> None:
        """Sleep until a commit may have happened."""
        self._watch()
        ready, _, _ = select.select([self._read, *([self._inotify] if self._inotify else [])], [], [], timeout)
        if self._read in ready:
            _drain(self._read)
        if self._inotify and self._inotify in ready:
            for event in self._inotify.read(timeout=0):
                if event.mask & _GONE:
                    self._watching = False  # the file was replaced; the next wait watches the new file

    def wake(self) -> None:
        """End a `wait` now, or the next one at once; thread-safe."""
        with self._open_or_closed:
            if self._closed:
                return
            try:
                os.write(self._write, b"!")
            except BlockingIOError:
                return  # the pipe is already full of wake-ups

    def close(self) -> None:
        """Release the pipe and the watch; a later `wake` does nothing."""
        with self._open_or_closed:
            if self._closed:
                return
            self._closed = True
            os.close(self._read)
            os.close(self._write)
            if self._inotify:
                self._inotify.close()

    def _watch(self) -> None:
        if self._inotify and not self._watching and os.path.exists(self._wal):
            try:
                self._inotify.add_watch(self._wal, _WRITTEN | _GONE)
                self._watching = True
            except OSError:
                self._inotify.close()
                self._inotify = None  # no inotify watches are left; the timeout remains


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


if sys.platform == "linux":
    from inotify_simple import INotify, flags

    _WRITTEN = flags.MODIFY
    _GONE = flags.DELETE_SELF | flags.MOVE_SELF | flags.IGNORED

    def _inotify() -> INotify | None:
        try:
            return INotify()
        except OSError:
            return None
else:
    _WRITTEN = _GONE = 0

    def _inotify() -> None:
        return None
