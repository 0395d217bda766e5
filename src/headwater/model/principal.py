"""The caller of a request, with its role and scopes; feeds, queries and ranges check it on every call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from headwater.errors import Forbidden, InvalidRequest, NotFound
from headwater.model.dependencies.dependency import Dependency

VIEWER, EDITOR, OWNER = "viewer", "editor", "owner"
RANK = {VIEWER: 1, EDITOR: 2, OWNER: 3}
JWT = "jwt:"  # prefix of the id of a token in `credential`; ids of API keys have no prefix


def is_label(text: object) -> bool:
    """Return whether `text` is usable as a name in logs and lists: not blank, no control or formatting characters."""
    return isinstance(text, str) and bool(text.strip()) and text.isprintable()


class Scope(msgspec.Struct, frozen=True, order=True):
    """A database, or some of its tables."""

    db: str
    tables: tuple[str, ...] = ()  # empty: all tables, and statements of any kind

    def __str__(self) -> str:
        return ",".join(f"{self.db}.{table}" for table in self.tables) or self.db


class Reads(Protocol):
    """The objects that a statement reads."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the base tables."""

    @property
    def beyond(self) -> tuple[str, ...]:
        """Return other stored objects that it may read."""

    @property
    def dependencies(self) -> Sequence[Dependency]:
        """Return the tables whose changes its subscribers receive."""


class Principal(msgspec.Struct, frozen=True):
    """A caller: a name for the logs, a role, and the scopes to which it is restricted."""

    name: str
    role: str = OWNER
    scopes: tuple[Scope, ...] | None = None  # None: everywhere
    credential: str = ""  # the id of the key or token, by which it can be revoked
    until: int | None = None  # expiry in ms since 1970
    issuer: str = ""  # the issuer of a token

    @property
    def account(self) -> str:
        """Return the id by which limits count the caller's use of the server.

        An API key has its own account; all tokens of one subject and issuer share one. `name` is only a label.
        Whatever the name of a caller, only ANONYMOUS has the account "anonymous".
        """
        if self.credential and not self.credential.startswith(JWT):
            return f"key:{self.credential}"
        if self.until is not None:  # every token has an expiry
            return f"{JWT}{self.name}\n{self.issuer}"  # a name has no line breaks
        return self.name if self is ANONYMOUS or self == ANONYMOUS else f"name:{self.name}"

    def need(self, role: str, what: str, instead: str = "") -> None:
        """Raise Forbidden unless the caller has at least `role`; `instead` ends the hint."""
        if RANK.get(self.role, 0) < RANK[role]:
            hint = f"Ask for another role. {instead}".rstrip()
            raise Forbidden(f"{what} needs the role {role}", hint=hint, role=role)

    def sees(self, db: str) -> bool:
        """Return whether any part of `db` is in the caller's scopes."""
        return self.scopes is None or any(scope.db == db for scope in self.scopes)

    def tables(self, db: str) -> frozenset[str] | None:
        """Return the tables of `db` to which the caller is restricted; None if it may use the whole database."""
        if self.scopes is None:
            return None
        mine = [scope for scope in self.scopes if scope.db == db]
        if any(not scope.tables for scope in mine):
            return None
        return frozenset(table for scope in mine for table in scope.tables)

    def check(self, db: str, tables: Iterable[str] | None = None) -> None:
        """Raise Forbidden unless these tables of `db`, or the whole of it if `tables` is None, are in the scopes.

        The message is the same whether or not they exist.
        """
        if self.scopes is None:
            return
        held = self.tables(db)
        if held is None:
            return
        missing = None if tables is None else sorted(set(tables) - held)
        if not self.sees(db) or missing is None:
            raise self._denied(db)
        if missing:
            raise self._denied(db, missing[0])

    def check_reads(self, db: str, reads: Reads) -> None:
        """Raise Forbidden if the caller is restricted to tables and the statement may read others.

        The message does not name them: a view may read tables whose names the caller must not learn.
        """
        held = self.tables(db)
        if held is None:
            return
        if not held.issuperset((*reads.tables, *reads.beyond, *(found.table for found in reads.dependencies))):
            raise self.unread(db)

    @contextmanager
    def understanding(self, db: str) -> Iterator[None]:
        """Turn errors that an analysis raises in the block into Forbidden, for a caller restricted to tables.

        Otherwise the errors of a statement would reveal which names exist.
        """
        if self.tables(db) is None:
            yield
            return
        try:
            yield
        except (InvalidRequest, NotFound, Forbidden):
            raise self.unread(db) from None

    def unread(self, db: str) -> Forbidden:
        """Return the one error for every statement that a caller restricted to tables may not run."""
        return Forbidden(
            f"{self.name!r} may run only statements that its tables in {db!r} alone can answer",
            hint=f"Send a SELECT of their rows. {self._scopes}",
            database=db,
            principal=self.name,
        )

    def may(self, db: str, table: str) -> bool:
        """Return whether this table is in the caller's scopes."""
        held = self.tables(db)
        return held is None or table in held

    def seen(self, db: str, tables: Iterable[str]) -> list[str]:
        """Return the `tables` that are in the caller's scopes."""
        return [table for table in tables if self.may(db, table)]

    def check_any_scope(self, db: str) -> None:
        """Raise Forbidden unless any part of `db` is in the caller's scopes."""
        if not self.sees(db):
            raise self._denied(db)

    def _denied(self, db: str, table: str = "") -> Forbidden:
        what = f"table {table[:200]!r} of {db[:200]!r}" if table else f"database {db[:200]!r}"
        said = f"access denied to {what} for {self.name!r}"
        return Forbidden(said, hint=self._scopes, database=db, principal=self.name)

    @property
    def _scopes(self) -> str:
        return f"Its scopes are {', '.join(map(str, self.scopes or ())) or 'empty'}."


ANONYMOUS = Principal("anonymous")  # loopback with authentication off
ADMIN = Principal("admin")  # the caller that sends HEADWATER_TOKEN
