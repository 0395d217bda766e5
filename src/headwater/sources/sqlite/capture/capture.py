"""Capture of a SQLite file: its capture table, and the proof that the log is its history."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

from headwater.errors import SourceMismatch, Unavailable
from headwater.model.change import Transaction
from headwater.sources.capture_stream import LogNotes
from headwater.sources.file_lock import FileLock
from headwater.sources.sqlite.capture.capture_table import PAGE, Follower
from headwater.sources.sqlite.capture.capture_trim import Trimmer
from headwater.sources.sqlite.capture.commit_watch import Waker
from headwater.sources.sqlite.capture.file_history import FileFacts, compare, judge
from headwater.sources.sqlite.capture.power_loss import ShutdownNotes
from headwater.sources.sqlite.capture.trigger_installation import (
    add_columns,
    check_format,
    demand_resnapshot,
    install_new_history,
    is_installed,
    meta,
    newest,
    reconcile,
)
from headwater.sources.sqlite.connection import OURS, immediate, sqlite_errors
from headwater.sources.sqlite.database_file import File
from headwater.sources.sqlite.query.authorizer import Guard
from headwater.sources.sqlite.settings import SqliteConfig

logger = logging.getLogger("headwater.sqlite")

MODE = "journal_mode_before"  # note that holds the previous journal mode until the file itself records it


class SqliteCapture:
    """Implementation of `Capturable` for one file. `submit` and `guard` belong to the writer of that file."""

    beginning = 0
    # Why the file does not match the log; kept until a new generation begins, even if the file is reopened.
    _doubted = ""

    def __init__(
        self,
        name: str,
        file: File,
        lock: FileLock,
        shutdown_notes: ShutdownNotes,
        submit: Callable[..., Any],
        guard: Guard,
        *,
        notes: LogNotes,
        config: SqliteConfig,
    ) -> None:
        self.name, self.path, self._file, self._lock = name, file.path, file, lock
        self._shutdown_notes, self._submit, self._guard = shutdown_notes, submit, guard
        self._notes, self._config = notes, config
        self._vouched = -1  # the schema_version for which triggers were last reconciled
        self._waker = Waker(os.path.realpath(self.path) + "-wal")
        self._own = file.connect_bare()
        self._own_lock = threading.Lock()  # guards _own
        self._trimmer = Trimmer(notes, lambda work: submit(work, ours=True, caller=OURS), guard, config)
        self._follower = Follower(
            file.connect_bare(),
            nonces=lambda: self._trimmer.nonces,
            reconcile=self._reconcile,
            demand_resnapshot=self._demand_resnapshot,
            saw_foreign=shutdown_notes.note_foreign,
        )

    # --- history ---------------------------------------------------------------------------------------------

    def prove(self, *, generation: str, latest: int, read: Callable[[int], Iterator[Transaction]]) -> str:
        """Return why the log is not this file's history; "" if it is, or if capture was installed for an empty log."""
        with self._own_lock, sqlite_errors(self.path):
            installed = is_installed(self._own)
        if not installed and latest:
            return self._another("the file has no capture tables: it is another file, or was detached")
        if not installed:
            self._install(generation, 0)
            return ""
        head = self.head()
        with self._own_lock, sqlite_errors(self.path):
            check_format(self._own)
            facts = FileFacts(
                file_generation=meta(self._own, "generation"),
                log_generation=generation,
                file_nonce=meta(self._own, "nonce"),
                log_nonces=(self._notes.note("nonce"), self._notes.note("pending_nonce")),
                head=head,
                latest=latest,
            )
        reason = judge(facts)
        if reason:
            return self._another(reason)
        reason = self._shutdown_notes.loss_reason()
        if not reason:
            self._file.enter_wal()
            with self._own_lock, sqlite_errors(self.path):
                add_columns(self._own)
            oldest = self._follower.oldest()
            reason = compare(self._follower.rows(oldest - 1, latest), read(max(oldest - 1 - PAGE, 0)), latest)
            self._trimmer.start(facts.file_nonce, oldest - 1)
            self._notes.set_notes(path=os.path.realpath(self.path))  # the file may have been moved
            self._shutdown_notes.begin()
        return reason

    def _another(self, reason: str) -> str:
        """Return `reason`; raise if the log belongs to another existing file, whose history must not end here."""
        home = self._notes.note("path")
        if home and home != os.path.realpath(self.path) and os.path.exists(home):
            raise SourceMismatch(
                f"the log of {self.name!r} belongs to {home}, not to {self.path}",
                hint=f"Give this database a name of its own (NAME={self.path}) or another --data folder.",
            )
        return reason

    def restart(self, *, generation: str, first: int) -> int:
        """Begin a new generation in this file; return its first offset."""
        return self._install(generation, first - 1) + 1

    def _install(self, generation: str, seq: int) -> int:
        mode = self._enter_wal()
        nonce = secrets.token_hex(8)
        self._notes.set_notes(nonce=nonce, pending_nonce="", path=os.path.realpath(self.path))
        facts = {"generation": generation, "nonce": nonce, "journal_mode_before": mode}

        def work(_: object) -> int:
            with self._guard.own() as db, sqlite_errors(self.path), immediate(db):
                begun = install_new_history(db, seq=seq, **facts)
                reconcile(db, self._config.tables, known_good=0, first=True)
                return begun

        begun: int = self._submit(work, alone=True).result().value
        self._notes.set_notes(**{MODE: ""})
        self._trimmer.start(nonce, begun)
        self._shutdown_notes.begin()
        self._doubted = ""
        return begun

    def _enter_wal(self) -> str:
        """Switch the file to WAL mode; return its previous mode, even if a killed start had already switched it."""
        mode = self._file.journal_mode_before
        if mode == "wal":
            return self._notes.note(MODE) or mode
        self._notes.set_notes(**{MODE: mode})
        self._file.enter_wal()
        return mode

    # --- the stream ------------------------------------------------------------------------------------------

    def head(self) -> int:
        """Return the newest offset in the file."""
        with self._own_lock, sqlite_errors(self.path):
            return newest(self._own)

    def follow(self, *, after: int) -> Iterator[Transaction]:
        """Yield committed transactions after `after`, up to the head now; SourceMismatch if history was lost."""
        try:
            self._check_lock()
            if not self._file.is_there():
                raise SourceMismatch(
                    f"{self._file.name} was replaced by another file", hint="Readers need a new snapshot."
                )
            yield from self._follower.follow(after)
        except SourceMismatch as error:
            self._vouched, self._doubted = -1, error.message  # so that no answer gets an ETag and no snapshot begins
            logger.warning("%s: %s", self.path, error.message)
            raise

    def wait(self, timeout: float) -> None:
        """Sleep until something may have been committed, at most `timeout` and `poll_seconds`."""
        self._waker.wait(min(timeout, self._config.poll_seconds))

    def wake(self) -> None:
        """End a `wait` now, or the next one at once."""
        self._waker.wake()

    def acknowledge(self, upto: int) -> None:
        """Allow the trimmer to delete captured rows up to `upto`, which the log holds."""
        self._trimmer.acknowledge(upto)

    def release(self, reason: str) -> None:
        """Do nothing: changes stay in the capture table until a log has them."""

    def _check_history(self) -> None:
        if self._doubted:
            raise Unavailable(self._doubted, hint="The log belongs to another history. See `headwater status`.")

    def _check_lock(self) -> None:
        """Take the lock file again if someone removed it; Unavailable if a second server has taken the lock since."""
        if self._lock.is_held:
            return
        try:
            lock = FileLock(self.path, what=self._file.name)
        except SourceMismatch as error:
            raise Unavailable(error.message, hint="Its lock file was removed. Stop one of the two servers.") from error
        self._lock.release()
        self._lock = lock

    def _reconcile(self, known_good: int) -> int:
        def work(_: object) -> int:
            with self._guard.own() as db:
                reconcile(db, self._config.tables, known_good=known_good)
                return int(str(db.pragma("schema_version")))

        self._vouched = self._submit(work, ours=True, caller=OURS).result().value
        return self._vouched

    def _demand_resnapshot(self, tables: set[str]) -> None:
        def work(_: object) -> None:
            with self._guard.own() as db:
                demand_resnapshot(db, tables)

        self._submit(work, ours=True, caller=OURS).result()
