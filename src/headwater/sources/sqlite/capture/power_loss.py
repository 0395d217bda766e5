"""Detection of a machine crash during foreign writes: commits that we read may not have been durable.

A foreign writer with synchronous=NORMAL loses its last commits in a power failure. If we had read and delivered
them, the same offsets would return with other content. Only the kernel's boot id reveals this, nothing in the file.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from headwater.errors import HeadwaterError
from headwater.sources.capture_stream import STOPPED, LogNotes

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the kernel's boot id, which changes with every start of the machine; "" where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class ShutdownNotes:
    """Keeper of three notes: the current boot id, whether the last stop was clean, whether others write to the file."""

    def __init__(self, notes: LogNotes) -> None:
        self._notes = notes
        self._proven = False
        self._has_noted_foreign = False

    def loss_reason(self) -> str:
        """Return why the commits read last may be lost; "" if they cannot be."""
        before = self._notes.note("boot_id")
        same_boot = not before or before == boot_id()
        if same_boot or self._notes.note(STOPPED) or not self._notes.note("foreign"):
            return ""
        return "the machine went down while other programs were writing: commits that were read may be lost"

    def begin(self) -> None:
        """Note the boot id of this run, and that it is not stopped."""
        self._proven = True
        self._notes.set_notes(**{"boot_id": boot_id(), STOPPED: ""})

    def note_foreign(self) -> None:
        """Note that another program writes to the file; called before its changes are delivered."""
        if not self._has_noted_foreign:
            self._has_noted_foreign = True
            if not self._notes.note("foreign"):
                self._notes.set_notes(foreign="yes")

    def end(self) -> None:
        """Note a clean stop, if `begin` was called: everything that was read is durable."""
        if self._proven:
            with suppress(HeadwaterError):  # if the log cannot be written, this stop is not clean
                self._notes.set_notes(**{STOPPED: "yes"})
