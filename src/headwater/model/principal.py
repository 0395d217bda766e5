"""Principal: who asks, what they may do, and where. Every entry into feeds, queries and ranges takes one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from headwater.errors import Forbidden, InvalidRequest, NotFound

VIEWER, EDITOR, OWNER = "viewer", "editor", "owner"
RANK = {VIEWER: 1, EDITOR: 2, OWNER: 3}
JWT = "jwt:"  # before the id of a token in `credential`; those of API keys have nothing before them


def is_label(text: object) -> bool:
    """Return whether `text` can name somebody in logs and lists: not empty, no control or formatting characters."""
    return isinstance(text, str) and bool(text.strip()) and text.isprintable()


class Scope(msgspec.Struct, frozen=True, order=True):
    """A database, or some of its tables."""

    db: str
    tables: tuple[str, ...] = ()  # none named: all of them, and statements of any kind

    def __str__(self) -> str:
        return ",".join(f"{self.db}.{table}" for table in self.tables) or self.db


class Depends(Protocol):
    """A table whose changes change an answer."""

    @property
    def table(self) -> str:
        """Its name."""
        ...


class Reads(Protocol):
    """What is known of a statement that reads."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Base tables."""
        ...

    @property
    def beyond(self) -> tuple[str, ...]:
        """What else it may read of what is stored."""
        ...

    @property
    def dependencies(self) -> Sequence[Depends]:
        """Return the tables whose changes its subscribers hear of."""
        ...


class Principal(msgspec.Struct, frozen=True):
    """A caller: a name for the logs, a role, and the scopes to which it is held."""

    name: str
    role: str = OWNER
    scopes: tuple[Scope, ...] | None = None  # None: everywhere
    credential: str = ""  # the id by which it is revoked
    until: int | None = None  # in ms of the epoch: then it is nobody's any more
    issuer: str = ""  # of a token

    @property
    def account(self) -> str:
        """Return the id under which the use of the server is counted.

        It is unique to a key, and to a subject of tokens, who may have many of them; `name` is only a label. Whatever
        anybody is named, only ANONYMOUS has the account "anonymous".
        """
        if self.credential and not self.credential.startswith(JWT):
            return f"key:{self.credential}"
        if self.until is not None:  # every token has an end
            return f"{JWT}{self.name}\n{self.issuer}"  # a name has no line breaks
        return self.name if self is ANONYMOUS or self == ANONYMOUS else f"name:{self.name}"

    def need(self, role: str, what: str, instead: str = "") -> None:
        """Forbidden unless it may do what takes `role`; `instead` says what may be done without."""
        if RANK.get(self.role, 0) < RANK[role]:
            hint = f"Ask for another role. {instead}".rstrip()
            raise Forbidden(f"{what} needs the role {role}", hint=hint, role=role)

    def sees(self, db: str) -> bool:
        """Whether any of `db` is its business."""
        return self.scopes is None or any(scope.db == db for scope in self.scopes)

    def tables(self, db: str) -> frozenset[str] | None:
        """The tables of `db` to which it is held; None where it has the whole database."""
        if self.scopes is None:
            return None
        mine = [scope for scope in self.scopes if scope.db == db]
        if any(not scope.tables for scope in mine):
            return None
        return frozenset(table for scope in mine for table in scope.tables)

    def check(self, db: str, tables: Iterable[str] | None = None) -> None:
        """Forbidden unless these tables of `db`, or without any named the whole of it, are in its scopes.

        The same is said of what exists and of what does not.
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
        """Forbidden if it is held to tables, and a statement may read anything but them.

        The statement is not told which: a view may read tables whose names are nobody's business.
        """
        held = self.tables(db)
        if held is None:
            return
        if not held.issuperset((*reads.tables, *reads.beyond, *(found.table for found in reads.dependencies))):
            raise self.unread(db)

    @contextmanager
    def understanding(self, db: str) -> Iterator[None]:
        """Inside, a statement is understood. To those held to tables a failure says the same as a refusal: else
        a statement would tell by its errors which names there are.
        """
        if self.tables(db) is None:
            yield
            return
        try:
            yield
        except (InvalidRequest, NotFound, Forbidden):
            raise self.unread(db) from None

    def unread(self, db: str) -> Forbidden:
        """What is said of a statement that may not run, or cannot, to those held to tables."""
        return Forbidden(
            f"the statement is not one that the tables of {self.name!r} in {db!r} alone can answer",
            hint=f"Send a SELECT of their rows. {self._scopes}",
            database=db,
            principal=self.name,
        )

    def may(self, db: str, table: str) -> bool:
        """Whether this table is in its scopes."""
        held = self.tables(db)
        return held is None or table in held

    def seen(self, db: str, tables: Iterable[str]) -> list[str]:
        """Those of `tables` that are in its scopes."""
        return [table for table in tables if self.may(db, table)]

    def glimpse(self, db: str) -> None:
        """Forbidden unless it may know of `db` at all."""
        if not self.sees(db):
            raise self._denied(db)

    def _denied(self, db: str, table: str = "") -> Forbidden:
        what = f"table {table!r} of {db!r}" if table else f"database {db!r}"
        said = f"access denied to {what} for {self.name!r}"
        return Forbidden(said, hint=self._scopes, database=db, principal=self.name)

    @property
    def _scopes(self) -> str:
        return f"Its scopes are {', '.join(map(str, self.scopes or ())) or 'empty'}."


ANONYMOUS = Principal("anonymous")  # loopback with authentication off
ADMIN = Principal("admin")  # holds HEADWATER_TOKEN
