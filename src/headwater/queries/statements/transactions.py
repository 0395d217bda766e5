"""The open transactions of each caller, and the execution of every write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from headwater.database import ManagedDatabases
from headwater.errors import Busy, InvalidRequest, NotFound, TxExpired
from headwater.model.database_name import real_name
from headwater.model.principal import OWNER, Principal
from headwater.queries.etag.causality import Token, token
from headwater.queries.statements.pending_answer import PendingAnswer
from headwater.sources.write import Session, Tx, Work

T = TypeVar("T")
A = TypeVar("A")

MAX_OPEN = 64  # of all principals: each transaction may hold a connection or the writer
SHARE_OF_CALLER = 4  # a caller that is not an owner may open at most a fourth of them
SHARE_OF_DATABASE = 2  # all such callers of one database together may open at most half of them
MAX_IDLE_SECONDS = 60.0  # a transaction idle for longer is rolled back when the limit is reached
MAX_EXPIRED = 1_000  # remembered expired transactions, reported as `tx_expired` rather than `not_found`


class BeginResult(msgspec.Struct, frozen=True):
    """The result of opening a transaction."""

    tx: str
    db: str
    read_only: bool


class EndResult(msgspec.Struct, frozen=True):
    """The result of ending a transaction."""

    tx: str
    status: str
    causality: Token | None = None


class _OpenTransaction:
    """One open transaction. `used` is guarded by the registry's lock."""

    __slots__ = ("db", "owner", "tx", "used")

    def __init__(self, tx: Tx, db: str, owner: Principal, used: float) -> None:
        self.tx, self.db, self.owner, self.used = tx, db, owner, used


class _Expired(msgspec.Struct, frozen=True):
    """A transaction that ended without a request of its owner."""

    db: str
    owner: Principal


class Transactions:
    """The registry of open transactions: bounded, and each usable only by the principal that began it."""

    def __init__(
        self, databases: ManagedDatabases, *, most: int = MAX_OPEN, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._databases = databases
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()  # guards all fields below
        self._open: dict[str, _OpenTransaction] = {}
        self._beginning: list[tuple[Principal, str]] = []  # owner and database of the transactions being opened
        self._expired: dict[str, _Expired] = {}  # the oldest first
        # Raises Unauthorized if the caller's credential has expired: work may be queued for a minute.
        self.check_credential: Callable[[Principal], object] = lambda principal: None

    def begin(self, principal: Principal, *, db: str | None = None, read_only: bool = False) -> BeginResult:
        """Open a transaction on one database; Busy if too many are open."""
        name = real_name(db)
        principal.check_any_scope(name)
        source = self._databases.get(name)
        self._roll_back(self._is_forgotten)
        self._reserve(principal, name)
        try:
            tx = source.begin(read_only=read_only, role=principal.role)
            with self._lock:
                self._open[tx.id] = _OpenTransaction(tx, name, principal, self._clock())
        finally:
            with self._lock:
                self._beginning.remove((principal, name))
        return BeginResult(tx.id, name, read_only)

    def commit(self, principal: Principal, tx: str) -> PendingAnswer[EndResult]:
        """Commit an open transaction of the caller, which is over then, also on an error."""
        held = self._take(principal, tx)
        return PendingAnswer(
            held.tx.commit(),
            lambda written: EndResult(tx, "committed", _visible_token(principal, held.db, written.tables)),
        )

    def rollback(self, principal: Principal, tx: str) -> PendingAnswer[EndResult]:
        """Roll back an open transaction of the caller."""
        held = self._take(principal, tx)
        return PendingAnswer(held.tx.rollback(), lambda _: EndResult(tx, "rolled_back"))

    def write(
        self,
        principal: Principal,
        db: str | None,
        tx: str | None,
        work: Callable[[str, Session], T],
        finish: Callable[[T, Token | None], A],
        *,
        as_owner: bool = False,
    ) -> PendingAnswer[A]:
        """Run `work`, which receives the database's name, in the open transaction `tx`, or in one of its own.

        `finish` receives the causality token, None if the write is not committed. `as_owner` runs `work` with the
        rights of owners, for work that contains no SQL from the caller.
        """

        def run(name: str, session: Session) -> T:
            self.check_credential(principal)
            return work(name, session)

        if tx is not None:
            held = self._use(principal, tx, db)
            future = self._run(held, lambda session: run(held.db, session))
            return PendingAnswer(future, lambda value: finish(value, None))
        name = real_name(db)
        principal.check_any_scope(name)
        role = OWNER if as_owner else principal.role
        caller = principal.account
        written = self._databases.get(name).write(lambda session: run(name, session), role=role, caller=caller)
        return PendingAnswer(written, lambda done: finish(done.value, _visible_token(principal, name, done.tables)))

    def inside(
        self, principal: Principal, tx: str, db: str | None, work: Callable[[str, Session], T]
    ) -> PendingAnswer[T]:
        """Run `work` in the open transaction `tx`, and return its value."""
        held = self._use(principal, tx, db)
        return PendingAnswer(self._run(held, lambda session: work(held.db, session)), lambda value: value)

    def check(self, principal: Principal, tx: str, db: str | None) -> str:
        """Return the database of an open transaction of this caller; raise NotFound, TxExpired, InvalidRequest."""
        return self._use(principal, tx, db).db

    def database_of(self, tx: str) -> str | None:
        """Return the database of an open transaction; None if there is no such transaction."""
        found = self._open.get(tx)
        return None if found is None else found.db

    def abandon(self, db: str) -> None:
        """Roll back all transactions on `db`, which is about to be dropped."""
        self._roll_back(lambda held: held.db == db)
        with self._lock:  # a caller must not retry on a dropped database, so these become `not_found`
            self._expired = {tx: found for tx, found in self._expired.items() if found.db != db}

    def close(self) -> None:
        """Roll back all open transactions."""
        self._roll_back(lambda _: True)

    def __len__(self) -> int:
        with self._lock:
            return sum(not held.tx.is_over for held in self._open.values())

    def _run(self, held: _OpenTransaction, work: Work[T]) -> Future[T]:
        future = held.tx.run(work)
        future.add_done_callback(lambda done: self._forget_if_over(held, done))
        return future

    def _forget_if_over(self, held: _OpenTransaction, done: Future[T]) -> None:
        if not done.cancelled() and isinstance(done.exception(), TxExpired):
            with self._lock:
                self._expire(held)

    def _expire(self, held: _OpenTransaction) -> None:
        """Record that a transaction ended without a request of its owner. The caller holds the lock."""
        if self._open.pop(held.tx.id, None) is None:  # the owner ended it concurrently
            return
        self._expired[held.tx.id] = _Expired(held.db, held.owner)
        if len(self._expired) > MAX_EXPIRED:
            del self._expired[next(iter(self._expired))]

    def _find(self, principal: Principal, tx: str) -> _OpenTransaction:
        held = self._open.get(tx)
        expired = self._expired.get(tx)
        if expired is not None and expired.owner == principal:
            raise TxExpired("the transaction has expired")
        if held is None or held.owner != principal:
            raise NotFound(
                f"there is no open transaction {tx!r}",
                hint="It was committed, rolled back, has expired, or belongs to another principal.",
            )
        return held

    def _use(self, principal: Principal, tx: str, db: str | None) -> _OpenTransaction:
        with self._lock:
            held = self._find(principal, tx)
            if db is not None and real_name(db) != held.db:
                raise InvalidRequest(
                    f"transaction {tx!r} is on database {held.db!r}, not {real_name(db)!r}",
                    hint="A transaction is bound to one database.",
                )
            held.used = self._clock()
        return held

    def _take(self, principal: Principal, tx: str) -> _OpenTransaction:
        with self._lock:
            held = self._find(principal, tx)
            del self._open[tx]
        return held

    def _roll_back(self, doomed: Callable[[_OpenTransaction], bool]) -> None:
        with self._lock:
            left = [held for held in self._open.values() if doomed(held)]
            for held in left:
                self._expire(held)
        for held in left:
            held.tx.rollback()

    def _is_forgotten(self, held: _OpenTransaction) -> bool:
        """Return whether a transaction ended by itself, or is idle for too long while the limit is reached."""
        full = len(self._open) + len(self._beginning) >= self._most
        return held.tx.is_over or (full and held.used < self._clock() - MAX_IDLE_SECONDS)

    def _reserve(self, principal: Principal, db: str) -> None:
        with self._lock:
            taken = [*self._beginning, *((held.owner, held.db) for held in self._open.values())]
            if len(taken) >= self._most:
                raise Busy(f"{self._most} transactions are open already", hint="Retry in a moment.")
            if principal.role != OWNER:
                callers = [(each.account, on) for each, on in taken if each.role != OWNER]
                mine = sum(account == principal.account for account, _ in callers)
                here = sum(on == db for _, on in callers)
                if mine >= max(self._most // SHARE_OF_CALLER, 1):
                    raise Busy(f"{mine} of your transactions are open already", hint="Commit or roll back some first.")
                if here >= max(self._most // SHARE_OF_DATABASE, 1):
                    raise Busy(f"{here} transactions are open on database {db!r} already", hint="Retry in a moment.")
            self._beginning.append((principal, db))


def _visible_token(principal: Principal, db: str, tables: Mapping[str, int]) -> Token:
    """Return the causality token of a write, without the tables outside the scopes of its caller.

    Triggers and foreign keys write to those too, and the token would contain their names.
    """
    return token(db, {table: tables[table] for table in principal.seen(db, tables)})


def one_tx(tx: str | None, tx_id: str | None) -> str:
    """Return the transaction of a request, which has two names for it; InvalidRequest if they differ or lack."""
    if tx is not None and tx_id is not None and tx != tx_id:
        raise InvalidRequest("`tx` and `tx_id` are different transactions", hint="Send one of them.")
    found = tx if tx is not None else tx_id
    if found is None:
        raise InvalidRequest("`tx_id` is missing", hint="Send the `tx_id` that tx.begin returned.")
    return found
