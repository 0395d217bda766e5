"""Did the machine go down while other programs were writing? Then what we read of them may never have been durable.

A foreign writer with synchronous=NORMAL loses its last commits in a power failure. If we had read and passed
them on, the same offsets would come again with other content. Nothing in the file tells; the kernel's boot id does.
"""

from __future__ import annotations

from pathlib import Path

from headwater.errors import HeadwaterError
from headwater.sources.capture_stream import STOPPED, Notes

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Changes with every start of the machine; "" where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class Witness:
    """Keeps three notes: the boot we run in, whether we stopped in order, whether others write to the file."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._proven = False
        self._told = False

    def doubt(self) -> str:
        """Why what was read last may be lost; "" if it cannot be."""
        before = self._notes.note("boot_id")
        same_boot = not before or before == boot_id()
        if same_boot or self._notes.note(STOPPED) or not self._notes.note("foreign"):
            return ""
        return "the machine went down while other programs were writing: commits that were read may be lost"

    def begin(self) -> None:
        """From now on the notes speak of this run."""
        self._proven = True
        self._notes.set_notes(**{"boot_id": boot_id(), STOPPED: ""})

    def saw_foreign(self) -> None:
        """Another program wrote; kept before anything of it is passed on."""
        if not self._told:
            self._told = True
            if not self._notes.note("foreign"):
                self._notes.set_notes(foreign="yes")

    def end(self) -> None:
        """Stopped in order: everything that was read is durable."""
        if self._proven:
            try:
                self._notes.set_notes(**{STOPPED: "yes"})
            except HeadwaterError:
                return  # the log cannot be written: then this was no stop in order
