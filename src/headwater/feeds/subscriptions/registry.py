"""The registry of all subscriptions: in memory for reading, in a SQLite file for durability."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import apsw
from msgspec.structs import replace

from headwater.errors import Conflict, LimitExceeded, NotFound
from headwater.feeds.options import Options
from headwater.feeds.subscription import SnapshotState, Subscription
from headwater.feeds.subscriptions import store
from headwater.feeds.subscriptions.group_commit import Apply, Commits
from headwater.log.sqlite_store import SqliteStore
from headwater.model.clock import wall_ms
from headwater.model.principal import OWNER, Principal
from headwater.model.work.usage import Usage

MOST = 100_000  # subscriptions
MOST_BYTES = 8 << 20  # of the stored options of one caller; in memory they take about 16 times as much
SHARE = 0.5  # the share of all subscriptions that one principal may have unless its role is owner
Fields = dict[str, Any]  # of a subscription, by name
Quota = Callable[[str], int | None]  # the limit of one database; None: no limit of its own


class Registry:
    """All subscriptions. Open it with `Registry.open`. Thread-safe; a change survives kill -9 once its method returned.

    Inside a commit only the file is up to date, because memory follows after it: two callers may share a commit.
    """

    def __init__(
        self, file: SqliteStore, most: int, most_bytes: int, clock_ms: Callable[[], int], quota: Quota
    ) -> None:
        self.path = file.path
        self._most, self._most_bytes, self._clock_ms, self._quota = most, most_bytes, clock_ms, quota
        self._lock = threading.Lock()  # guards what follows, and the fields of every subscription
        self._all = {found.id: found for found in store.load(file)}
        self._names: dict[tuple[str, str], str] = {}
        self._by_name: dict[str, set[str]] = {}  # ids in all databases
        self._bytes: Usage[str] = Usage()  # of stored options by owner, also of those that are not committed yet
        for found in self._all.values():
            self._index(found)
            self._bytes.add(found.owner, store.stored_bytes(found.options))
        with file.connection() as connection:
            self._positions = {(one.db, one.instance): one for one in store.load_positions(connection)}
        self._unwritten: set[str] = set()  # whose `quiet` is further than the file says
        self._commits = Commits(file, self._lock)

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        *,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        quota: Quota = lambda db: None,
        clock_ms: Callable[[], int] = wall_ms,
        vfs: str | None = None,
    ) -> Registry:
        """Open or create the file at `path`; LogDamaged if it is another's, of a newer Headwater, or broken."""
        file = SqliteStore(store.FORMAT, Path(path), vfs=vfs)
        try:
            return cls(file, most, most_bytes, clock_ms, quota)
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        """Write pending positions and close the file."""
        try:
            self.flush_quiet()
        finally:
            self._commits.close()

    # Lookup

    def get(self, principal: Principal, id: str) -> Subscription:
        """Return the subscription `id`; raise NotFound also if `principal` may not see it."""
        found = self._all.get(id)
        if found is None or not _is_for(principal, found):
            meant = self._named(principal, id)
            raise unknown(id, f"{id[:40]!r} is the name of {meant}: send the id {meant}." if meant else "")
        return found

    def _named(self, principal: Principal, name: str) -> str:
        """Return the id of a subscription called `name` that `principal` may see; "" if there is none."""
        with self._lock:
            named = [self._all[id] for id in self._by_name.get(name, ())]
        visible = (one for one in named if _is_for(principal, one) and not depends_on_query_reads(one, principal))
        return next((one.id for one in visible), "")

    def database_of(self, id: str) -> str | None:
        """Return the database of the subscription `id` of any owner; None if there is no such subscription."""
        found = self._all.get(id)
        return None if found is None else found.db

    def named(
        self, principal: Principal, options: Options, name: str, *, names_images: bool = True
    ) -> Subscription | None:
        """Return the existing subscription with this name, or None; raise Conflict as `create` does."""
        with self._lock:
            found = self._all.get(self._names.get((options.db, name), ""))
        if found is not None:
            _check_same(principal, found.owner, name, options, found.options, names_images)
        return found

    def visible_to(self, principal: Principal, db: str | None = None) -> list[Subscription]:
        """Return the subscriptions that `principal` may see, of one database or of all, oldest first."""
        found = self._everything() if db is None else self.for_db(db)
        tables = functools.cache(principal.tables)  # computed once for each database, not for each subscription
        return [one for one in found if may_see(principal, one.owner) and _fits(one, tables(one.db))]

    def queries_to_check(self, principal: Principal) -> list[Subscription]:
        """Return one subscription per query that `principal` may see only with access to the tables of the query."""
        tables = functools.cache(principal.tables)
        found = [one for one in self.visible_to(principal) if one.options.query_id and tables(one.db) is not None]
        return list({one.options.query_id: one for one in reversed(found)}.values())

    def for_db(self, db: str) -> list[Subscription]:
        """Return the subscriptions of one database, oldest first."""
        return [one for one in self._everything() if one.db == db]

    def with_queries(self) -> list[Subscription]:
        """Return the subscriptions to queries, oldest first."""
        return [one for one in self._everything() if one.options.query_id]

    def _everything(self) -> list[Subscription]:
        with self._lock:
            return list(self._all.values())

    # Creation and removal

    def create(
        self,
        principal: Principal,
        options: Options,
        *,
        acked: int,
        name: str | None = None,
        snapshot: SnapshotState | None = None,
        names_images: bool = True,
    ) -> tuple[Subscription, bool]:
        """Return a new subscription and True, or the existing one with this name and False.

        Raises Conflict if the existing one has another owner or other options; images are compared if they were
        named. Raises LimitExceeded at a limit of the server, the database or the caller.
        """

        size, is_reserved = store.stored_bytes(options), False

        def work(connection: apsw.Connection) -> Apply[tuple[Subscription, bool]]:
            nonlocal is_reserved
            held = None if name is None else store.named(connection, options.db, name)
            if held is not None:
                id, owner, theirs = held
                _check_same(principal, owner, str(name), options, theirs, names_images)
                return lambda: (self._all[id], False)
            if store.count(connection) >= self._most:
                raise LimitExceeded(
                    f"the limit of {self._most} subscriptions is reached",
                    hint="Close subscriptions that nobody reads, or raise feeds.max_subscriptions.",
                )
            self._check_share(connection, principal)
            quota = self._quota(options.db)
            if quota is not None and store.count(connection, options.db) >= quota:
                raise LimitExceeded(
                    f"the limit of {quota} subscriptions of database {options.db!r} is reached",
                    hint="Close subscriptions that nobody reads, or raise max_subscriptions of the database.",
                )
            made = Subscription(
                id=store.next_id(connection),
                name=name,
                owner=principal.name,
                options=options,
                created_ms=self._clock_ms(),
                acked=acked,
                quiet=acked,
                snapshot=snapshot,
            )
            self._reserve(principal, size)
            is_reserved = True
            store.insert(connection, made)
            return lambda: (self._remember(made), True)

        try:
            return self._commits.run(work)
        except BaseException:
            if is_reserved:
                with self._lock:
                    self._bytes.remove(principal.name, size)
            raise

    def _reserve(self, principal: Principal, size: int) -> None:
        """Count the options of a new subscription; LimitExceeded if a caller other than an owner stores too many.

        Memory has the count before the commit, because callers that share a commit share the limit, too.
        """
        with self._lock:
            if principal.role != OWNER and self._bytes[principal.name] + size > self._most_bytes:
                raise LimitExceeded(
                    f"the subscriptions of {principal.name!r} would store more than {self._most_bytes} bytes of "
                    "options, the limit of one caller",
                    hint="Close subscriptions that you no longer use, send key ranges instead of single keys, or raise "
                    "feeds.max_subscription_bytes.",
                )
            self._bytes.add(principal.name, size)

    def _check_share(self, connection: apsw.Connection, principal: Principal) -> None:
        """Raise LimitExceeded if a caller without the owner role has reached its share of max_subscriptions."""
        share = max(int(self._most * SHARE), 1)
        if principal.role != OWNER and store.count_of(connection, principal.name) >= share:
            raise LimitExceeded(
                f"{principal.name!r} has reached the limit of {share} subscriptions of one caller",
                hint="Close subscriptions that you no longer use, or raise feeds.max_subscriptions.",
            )

    def remove(self, id: str) -> None:
        """Delete a closed subscription. Its id is never used again."""

        def work(connection: apsw.Connection) -> Apply[None]:
            self._find(connection, id)
            store.delete(connection, id)
            return lambda: self._forget(id)

        self._commits.run(work)

    def close_db(self, db: str) -> None:
        """Delete every subscription of a dropped database."""

        def work(connection: apsw.Connection) -> Apply[None]:
            gone = store.ids_of(connection, db)
            for id in gone:
                store.delete(connection, id)
            return lambda: self._forget(*gone)

        self._commits.run(work)

    def _remember(self, made: Subscription) -> Subscription:
        self._index(made)
        return self._all.setdefault(made.id, made)

    def _index(self, made: Subscription) -> None:
        if made.name is not None:
            self._names[made.db, made.name] = made.id
            self._by_name.setdefault(made.name, set()).add(made.id)

    def _forget(self, *ids: str) -> None:
        for id in ids:
            gone = self._all.pop(id, None)
            if gone is not None:
                self._bytes.remove(gone.owner, store.stored_bytes(gone.options))
            if gone is not None and gone.name is not None:
                self._names.pop((gone.db, gone.name), None)
                self._by_name[gone.name].discard(id)
                if not self._by_name[gone.name]:
                    del self._by_name[gone.name]
            self._unwritten.discard(id)

    # Position

    def ack(self, id: str, offset: int) -> Subscription:
        """Acknowledge all changes up to `offset`; an older offset changes nothing."""
        known = self._all.get(id)
        if known is not None and offset <= known.acked:
            return known

        return self._change(id, lambda connection: {"acked": store.ack(connection, id, offset)})

    def seek(self, id: str, offset: int) -> Subscription:
        """Set both the acknowledged and the quiet offset to `offset`, forwards or backwards."""
        return self._change(id, lambda connection: store.seek(connection, id, offset))

    def set_paused(self, id: str, paused: bool) -> Subscription:
        """Pause delivery if `paused`, else resume it."""
        return self._change(id, lambda connection: store.set_paused(connection, id, paused))

    def save_snapshot(self, id: str, state: SnapshotState | None, *, acked: int | None = None) -> Subscription:
        """Save the progress of the snapshot, None when it is complete; with `acked`, seek there in the same commit.

        Writes only the chunks read since the last call.
        """

        def write(connection: apsw.Connection) -> Fields:
            store.set_snapshot(connection, id, state)
            return {"snapshot": state} | ({} if acked is None else store.seek(connection, id, acked))

        return self._change(id, write)

    def _change(self, id: str, write: Callable[[apsw.Connection], Fields]) -> Subscription:
        """Commit what `write` writes, then set the fields that it returns; return the subscription."""

        def work(connection: apsw.Connection) -> Apply[Subscription]:
            found = self._find(connection, id)
            fields = write(connection)
            return lambda: _set(found, fields)

        return self._commits.run(work)

    # Quiet stretches

    def quiet(self, id: str, upto: int, *, after: int) -> bool:
        """Move the cursor of `id` over (after, upto], in which no change passes its filter; return whether it moved.

        Changes memory only: `flush_quiet`, or any other change of the subscription, writes the new position.
        """
        with self._lock:
            found = self._all.get(id)
            # A cursor that a concurrent seek moved back is before the stretch that was scanned.
            if found is None or not after <= found.cursor < upto:
                return False
            found.quiet = upto
            self._unwritten.add(id)
            return True

    def flush_quiet(self) -> None:
        """Write the positions that `quiet` moved."""
        if not self._unwritten:
            return

        def work(connection: apsw.Connection) -> Apply[None]:
            with self._lock:
                due = [self._all[id] for id in self._unwritten]
                places = [(one.id, one.acked, one.quiet) for one in due]
            for id, acked, quiet in places:
                store.keep_quiet(connection, id, acked=acked, quiet=quiet)
            return lambda: self._written(places)

        self._commits.run(work)

    def _written(self, places: list[tuple[str, int, int]]) -> None:
        for id, _, quiet in places:
            if id not in self._all or self._all[id].quiet <= quiet:
                self._unwritten.discard(id)

    # Instances of queries

    def position(self, db: str, instance: str) -> store.InstancePosition | None:
        """Return the last saved position of a watched query instance; None if there is none."""
        with self._lock:
            return self._positions.get((db, instance))

    def save_positions(self, positions: Sequence[store.InstancePosition], but: Collection[str] = ()) -> None:
        """Save `positions` of watched instances, and delete all others except those of the databases `but`."""

        def work(connection: apsw.Connection) -> Apply[None]:
            with self._lock:
                kept = [one for one in positions if self._positions.get((one.db, one.instance)) != one]
                new = {place: one for place, one in self._positions.items() if one.db in but}
                new |= {(one.db, one.instance): one for one in positions}
                gone = [one for place, one in self._positions.items() if place not in new]
            store.save_positions(connection, kept, gone)
            return lambda: setattr(self, "_positions", new)

        if positions or self._positions:
            self._commits.run(work)

    def _find(self, connection: apsw.Connection, id: str) -> Subscription:
        """Return the subscription before a write, and write its pending `quiet` in the same commit."""
        with self._lock:
            found = self._all.get(id)
            acked, quiet = (0, 0) if found is None else (found.acked, found.quiet)
        if found is None or not store.keep_quiet(connection, id, acked=acked, quiet=quiet):
            raise unknown(id)
        return found


def may_see(principal: Principal, owner: str) -> bool:
    """Return whether `principal` may see objects that `owner` created: its own, or all with the owner role."""
    return principal.role == OWNER or principal.name == owner


def _is_for(principal: Principal, one: Subscription) -> bool:
    """Return whether `principal` may see `one`: by its owner, and by the scopes on its tables.

    The tables of a query are not known here: if `depends_on_query_reads`, the caller checks them.
    """
    return may_see(principal, one.owner) and _fits(one, principal.tables(one.db))


def _fits(one: Subscription, tables: frozenset[str] | None) -> bool:
    """Return whether a caller who is restricted to `tables` of its database may see `one`; None: not restricted."""
    if tables is None:
        return True
    if one.options.query_id:
        return bool(tables)
    return bool(one.options.tables) and tables.issuperset(one.options.tables)


def depends_on_query_reads(one: Subscription, principal: Principal) -> bool:
    """Return whether `principal` may see `one` only if its scopes have all tables that the query of `one` reads."""
    return bool(one.options.query_id) and principal.tables(one.db) is not None


def unknown(id: str, hint: str = "") -> NotFound:
    """Return the error for a subscription that does not exist or that the caller may not see."""
    hint = hint or "Subscribe again: the subscription was closed, or has another owner."
    return NotFound(f"unknown sub_id {id[:40]!r}", hint=hint)


def _check_same(
    principal: Principal, owner: str, name: str, options: Options, theirs: Options, names_images: bool
) -> None:
    if not may_see(principal, owner):
        raise Conflict(f"the name {name!r} is taken in {options.db!r}", hint="Choose another name.")
    if not names_images:
        options = replace(options, before=theirs.before, after=theirs.after)
    if options != theirs:
        raise Conflict(
            f"the subscription {name!r} of {options.db!r} exists with other options",
            hint="Close it first, or subscribe under another name.",
        )


def _set(found: Subscription, fields: Fields) -> Subscription:
    for name, value in fields.items():
        setattr(found, name, value)
    return found
