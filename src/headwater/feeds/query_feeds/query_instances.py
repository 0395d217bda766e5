"""What feeds need to know of queries: an instance that can say what matters to it, and where such come from.

Queries stand beside feeds, not below: `headwater.queries.dependencies.subscribed_instances` fulfils these protocols.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import msgspec

from headwater.model.change import Change
from headwater.model.principal import Depends, Principal

Args = list[Any] | dict[str, Any]  # Lits, by place or by name


class Reason(msgspec.Struct, frozen=True):
    """Why a change matters to an instance."""

    table: str
    columns: list[str] | None  # those that differ, or that are seen of a new or gone row; None is all
    condition: str  # in words


class Answered(msgspec.Struct, frozen=True):
    """What an instance answers: a hash of it, and the offset at which it was read."""

    offset: int
    digest: bytes


class Question(Protocol):
    """A query with its arguments, as it is understood in one state of the schema. Use it from any thread."""

    @property
    def key(self) -> Hashable:
        """Equal for the same query with the same arguments, however they are understood."""
        ...

    @property
    def query_id(self) -> str:
        """The query."""
        ...

    @property
    def db(self) -> str:
        """The database that it is asked of."""
        ...

    @property
    def url(self) -> str:
        """Where its answer is to be had."""
        ...

    @property
    def tables(self) -> tuple[str, ...]:
        """The base tables that it reads."""
        ...

    @property
    def beyond(self) -> tuple[str, ...]:
        """What else it may read of what is stored."""
        ...

    @property
    def follows_all(self) -> bool:
        """Return whether its subscribers hear of every change of the database, because nobody knows what matters."""
        ...

    @property
    def dependencies(self) -> Sequence[Depends]:
        """Return the tables whose changes its subscribers hear of."""
        ...

    @property
    def prefix(self) -> str:
        """Another one whenever it is understood in another way: tags do not compare across."""
        ...

    @property
    def head(self) -> int:
        """It is understood as of this offset or later: a change of the schema behind it calls for another look."""
        ...

    def matters(self, change: Change) -> int | None:
        """The first place of the query to which `change` matters; None when it cannot change the answer."""
        ...

    def reason(self, change: Change, place: int) -> Reason:
        """Why `change` matters to `place`."""
        ...

    def tag(self, offset: int) -> str:
        """The tag of its answer while the last change that mattered is that at `offset`."""
        ...

    def offset_of(self, etag: str) -> int | None:
        """The offset in a tag of this very question, in any format of answers; None for any other tag."""
        ...

    def answer(self) -> Answered | None:
        """Ask it now. Blocks. None when no two answers of it can be compared."""
        ...

    @property
    def is_guarded(self) -> bool:
        """Whether `steady` may say more than what matters does. Cheap."""
        ...

    def steady(self, upto: int) -> int | None:
        """An offset from which on the answer is known to be the same until `upto` or later, whatever mattered; None
        where none is known. Blocks for as long as it takes to look at the log up to there."""
        ...


class Routes(Protocol):
    """Which of many questions a change matters to, at a cost that does not grow with their number. For one thread."""

    def add(self, question: Question) -> None:
        """Route to its key what matters to it, instead of what was routed there."""
        ...

    def remove(self, key: Hashable) -> None:
        """Route nothing to `key` any more, if there was anything."""
        ...

    def route(self, change: Change) -> list[tuple[Hashable, int]]:
        """The keys to which `change` matters, each with the first place that it matters to."""
        ...


class Questions(Protocol):
    """Where questions come from. In the loop."""

    async def find(
        self, db: str | None, query_id: str, args: Args, *, who: Principal | None = None, strict: bool = True
    ) -> Question:
        """The question as it is understood now. NotFound, InvalidRequest; NotSupported where answers have no tag;
        Forbidden where it reads what is none of `who`'s business.

        Without `strict`, for one that was found before: when it cannot be asked any more, because its tables are
        gone, it is found all the same, and every change of the schema matters to it.
        """
        ...

    def routes(self, db: str) -> Routes:
        """An empty router for questions of one database."""
        ...

    def hold(self, db: str, question: Question, *, last: int | None = None, since: int | None = None) -> None:
        """Make its tag canonical until `release`: `last` mattered to it, and nothing else up to `since`.

        Blocks, for as long as it takes to look at what came after `since`.
        """
        ...

    def release(self, db: str, key: Hashable) -> None:
        """Its tag need not be canonical any more."""
        ...

    def position(self, db: str, key: Hashable) -> tuple[str, int, int] | None:
        """Of one that is held: its prefix, the last change that mattered to it, and how far was looked. May block."""
        ...
