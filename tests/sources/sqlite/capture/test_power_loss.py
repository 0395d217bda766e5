"""Power failures under a foreign writer: doubt if commits may be lost, none if they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.log.memory_log import MemoryLog
from tests.sources.sqlite.capture.test_file_history import T, running
from tests.sources.sqlite_writer_process import Foreign

from headwater.log.disk.disk_log import DiskLog
from headwater.sources.sqlite.capture.power_loss import ShutdownNotes, boot_id

OTHER_BOOT = {"boot_id": "an earlier boot"}


def witness(**notes: str) -> ShutdownNotes:
    log = MemoryLog()
    log.set_notes(**notes)
    return ShutdownNotes(log)


def test_reboot_under_foreign_writers_is_reported_as_doubt() -> None:
    assert "machine went down" in witness(**OTHER_BOOT, foreign="yes").loss_reason()


@pytest.mark.parametrize(
    "notes",
    [
        {},  # never ran
        {**OTHER_BOOT, "foreign": "yes", "stopped": "yes"},  # stopped in order
        {**OTHER_BOOT},  # only our own writer, which is durable before it answers
        {"boot_id": boot_id(), "foreign": "yes"},  # kill -9 loses nothing the kernel has
    ],
)
def test_without_a_reboot_a_foreign_writer_or_a_crash_there_is_no_doubt(notes: dict[str, str]) -> None:
    assert witness(**notes).loss_reason() == ""


def test_shutdown_notes_record_boot_foreign_writers_and_orderly_stop() -> None:
    log = MemoryLog()
    one = ShutdownNotes(log)
    one.begin()
    assert (log.note("boot_id"), log.note("stopped"), log.note("foreign")) == (boot_id(), "", "")
    one.note_foreign()
    one.end()
    assert (log.note("stopped"), log.note("foreign")) == ("yes", "yes")


@pytest.mark.parametrize(("stopped", "expected"), [("", "new"), ("yes", "same")])
def test_power_failure_begins_a_new_generation(tmp_path: Path, foreign: Foreign, stopped: str, expected: str) -> None:
    # Given a file that another process writes to, and a server that went down with the machine
    with running(tmp_path) as one:
        one.run(T)
        foreign.open(tmp_path / "app.db")
        foreign.run("INSERT INTO t VALUES (1, 'x')")
        one.caught_up()
        generation, latest = one.log.generation, one.log.latest
    log = DiskLog.open(tmp_path / "app.log.db")
    log.set_notes(**OTHER_BOOT, stopped=stopped)
    log.close()
    # When it starts again
    with running(tmp_path) as one:
        # Then its offsets begin anew, unless it had stopped in order before
        if expected == "same":
            assert one.log.generation == generation
        else:
            assert one.log.generation != generation and one.log.horizon >= latest + 2
            assert "machine went down" in one.log.generation_reason
