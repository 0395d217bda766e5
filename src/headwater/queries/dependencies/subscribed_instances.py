"""Instances of queries that have subscribers. Fulfils the protocols of feeds/query_feeds/query_instances.py."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.change import Change, Op
from headwater.model.dependencies.dependency import AllOf, AnyOf, Condition, Const, Param, Test
from headwater.model.dependencies.description import of_condition
from headwater.model.formats import ANSWER_FORMATS
from headwater.model.literal import Value, from_lit
from headwater.model.principal import ADMIN, Depends, Principal
from headwater.model.row_msgpack import encode_row
from headwater.queries.answers import ENCODED_AT_ONCE, Answering
from headwater.queries.dependencies.instance_router import Router
from headwater.queries.dependencies.instances import Instance
from headwater.queries.etag.query_etag import QueryTag, read_tag
from headwater.queries.etag.row_etag import opaque
from headwater.queries.prepared import Prepared
from headwater.queries.queries import Queries
from headwater.sources.query import Queryable

ANY = ""  # any table
Args = list[Any] | dict[str, Any]  # Lits


class Reason(msgspec.Struct, frozen=True):
    """Why a change matters."""

    table: str
    columns: list[str] | None
    condition: str


class Answered(msgspec.Struct, frozen=True):
    """A hash of an answer, and where it was read."""

    offset: int
    digest: bytes


class Asked:
    """An instance as it is understood at `head` or later."""

    follows_all = False

    def __init__(self, instance: Instance, key: Hashable, url: str, head: int, answering: Answering) -> None:
        self.instance, self.key, self.url, self.head = instance, key, url, head
        self._answering = answering
        self.query_id, self.db = instance.prepared.id, instance.prepared.db
        self.tables, self.beyond = instance.analysis.tables, instance.analysis.beyond
        self.dependencies = instance.analysis.dependencies
        self.prefix = instance.prefix(ANSWER_FORMATS[0])
        self._conditions: dict[int, str] = {}

    def matters(self, change: Change) -> int | None:
        """The first place to which `change` matters."""
        return self.instance.bound.matters(change)

    def reason(self, change: Change, place: int) -> Reason:
        """Why it does."""
        if change.op is Op.SCHEMA_CHANGE:
            return Reason(change.table.name, None, "the definition of the table changed")
        if change.before is None and change.after is None:
            return Reason(change.table.name, None, "all rows of the table may be others")
        return Reason(change.table.name, self._columns(change, place), self._condition(place))

    def _columns(self, change: Change, place: int) -> list[str] | None:
        seen = self.instance.analysis.dependencies[place].columns
        before, after = change.before, change.after
        if before is None or after is None:
            return None if seen is None else sorted(seen)
        pairs = zip(change.table.columns, before, after, strict=True)
        differ = [column.name for column, old, new in pairs if encode_row((old,)) != encode_row((new,))]
        return sorted(name for name in differ if seen is None or name in seen)

    def _condition(self, place: int) -> str:
        found = self._conditions.get(place)
        if found is None:
            condition = self.instance.analysis.dependencies[place].condition
            found = of_condition(_bound(condition, self.instance.args)) or "any row"
            self._conditions[place] = found
        return found

    def tag(self, offset: int) -> str:
        """The canonical tag."""
        return QueryTag(self.prefix, offset).write(weak=not self.instance.analysis.is_total)

    def offset_of(self, etag: str) -> int | None:
        """Where a tag of this instance stands."""
        tag = read_tag(opaque(etag))
        if tag is None or all(tag.prefix != self.instance.prefix(format) for format in ANSWER_FORMATS):
            return None
        return tag.offset

    def answer(self) -> Answered | None:
        """Ask now; blocks."""
        read = self._answering.read(self.instance)
        if read is None or read.truncated or not read.settled:
            return None
        digest = hashlib.blake2b(encode_row(read.columns), digest_size=16)
        for row in read.rows:
            digest.update(encode_row(row))
        return Answered(read.offset, digest.digest())

    @property
    def is_guarded(self) -> bool:
        """Whether something may be known of changes that matter but change nothing."""
        return self._answering.versions.is_guarded(self.instance.key)

    def steady(self, upto: int) -> int | None:
        """From where on the answer is known to be the same until `upto` or later."""
        return self._answering.versions.steady(self.instance.key, self.instance.bound, upto)


class Lost:
    """An instance that cannot be asked for now, because what it reads is gone. Only a change of the schema can help."""

    tables: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ("what is gone ()",)  # any change of the schema is told of
    dependencies: tuple[Depends, ...] = ()
    follows_all = False
    is_guarded = False

    def __init__(self, prepared: Prepared, key: Hashable, url: str, head: int) -> None:
        self.query_id, self.db, self.key, self.url, self.head = prepared.id, prepared.db, key, url, head
        self.prefix = "lost-" + prepared.id[2:13].ljust(11, "0")  # of no answer at all
        self.wanted: tuple[str, ...] = ()  # tables of which every change matters

    def matters(self, change: Change) -> int | None:
        """Any change of the schema."""
        return 0 if change.op is Op.SCHEMA_CHANGE else None

    def reason(self, change: Change, place: int) -> Reason:
        """Why it does."""
        return Reason(change.table.name, None, "the query could not be asked before")

    def tag(self, offset: int) -> str:
        """A tag that no answer has."""
        return QueryTag(self.prefix, offset).write()

    def offset_of(self, etag: str) -> int | None:
        """No tag is its own."""
        return None

    def answer(self) -> Answered | None:
        """There is none."""
        return None

    def steady(self, upto: int) -> int | None:
        """Nothing is known of it."""
        return None


class Volatile(Lost):
    """An instance whose answers cannot be kept any more: every change of its tables matters, and of the schema.

    Where it reads something whose changes no log has, any change at all does: better too often than never.
    """

    def __init__(self, instance: Instance, key: Hashable, url: str, head: int) -> None:
        super().__init__(instance.prepared, key, url, head)
        analysis = instance.analysis
        self.tables, self.beyond, self.dependencies = analysis.tables, analysis.beyond, analysis.dependencies
        self.wanted = (ANY,) if analysis.unseen else analysis.tables
        self.follows_all = bool(analysis.unseen)
        self.prefix = "none" + instance.prefix(ANSWER_FORMATS[0])[4:]  # of no answer: those have no tags
        told = "any change" if analysis.unseen else "every change of its tables"
        self._why = f"{told}: the answer cannot be kept, {'; '.join(analysis.volatile)}"

    def matters(self, change: Change) -> int | None:
        """Any change of its tables, or of the schema."""
        if change.op is Op.SCHEMA_CHANGE or ANY in self.wanted or change.table.name in self.wanted:
            return 0
        return None

    def reason(self, change: Change, place: int) -> Reason:
        """Why it does."""
        why = "the schema changed" if change.op is Op.SCHEMA_CHANGE else self._why
        return Reason(change.table.name, None, why)


class Routing:
    """A router of questions. For one thread."""

    def __init__(self, source: Queryable) -> None:
        self._router = Router(source)
        self._lost: dict[Hashable, tuple[str, ...]] = {}  # the tables whose changes matter
        self._volatile: dict[str, dict[Hashable, None]] = {}  # by table

    def add(self, question: Any) -> None:
        """Route to it."""
        self.remove(question.key)
        if isinstance(question, Asked):
            self._router.add(question.key, question.instance.bound)
        else:
            wanted = self._lost[question.key] = question.wanted
            for table in wanted:
                self._volatile.setdefault(table, {})[question.key] = None

    def remove(self, key: Hashable) -> None:
        """Route nothing to it."""
        self._router.remove(key)
        for table in self._lost.pop(key, ()):
            del self._volatile[table][key]
            if not self._volatile[table]:
                del self._volatile[table]

    def route(self, change: Change) -> list[tuple[Hashable, int]]:
        """The keys to which `change` matters."""
        found = self._router.route(change)
        if not self._lost:
            return found
        if change.op is Op.SCHEMA_CHANGE:
            return [*found, *((key, 0) for key in self._lost)]
        others = (*self._volatile.get(change.table.name, ()), *self._volatile.get(ANY, ()))
        return [*found, *((key, 0) for key in others)]


class Subscribed:
    """The instances that feeds ask for. In the loop, but for `hold`."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._held: dict[tuple[str, Hashable], Asked] = {}  # as it was understood last
        self._names: dict[tuple[str, Hashable], set[Hashable]] = {}  # of one instance: arguments by place, and by name

    async def find(
        self, db: str | None, query_id: str, args: Args, *, who: Principal | None = None, strict: bool = True
    ) -> Any:
        """The instance as it is understood now."""
        prepared = self._queries.get(who or ADMIN, query_id)
        if who is not None:
            await self._queries.allow(who, prepared)
        answering = self._queries.answering(prepared.db)
        key = query_id, msgspec.json.encode(args)
        url = _url(*key) if len(key[1]) <= ENCODED_AT_ONCE else await self._queries.run(_url, *key)
        try:
            instance, head = await answering.understood(prepared, _values(args))
            if not instance.analysis.is_cacheable:
                if not strict:
                    return Volatile(instance, key, url, head)
                reasons = "; ".join(instance.analysis.volatile)
                raise NotSupported(f"no feed can tell when this query is stale: {reasons}", hint="Poll it.")
        except InvalidRequest:
            if strict:
                raise
            return Lost(prepared, key, url, await answering.head())
        found = Asked(instance, key, url, head, answering)
        if (prepared.db, key) in self._held:
            self._held[prepared.db, key] = found
        return found

    def routes(self, db: str) -> Routing:
        """An empty router."""
        return Routing(self._queries.answering(db).database.source)

    def hold(self, db: str, question: Any, *, last: int | None = None, since: int | None = None) -> None:
        """Make its tag canonical until `release`. From any thread."""
        if isinstance(question, Asked):
            self._held[db, question.key] = question
            self._names.setdefault((db, question.instance.key), set()).add(question.key)
            self._answering(question).hold(question.instance, last=last, since=since)

    def release(self, db: str, key: Hashable) -> None:
        """It need not be any more, unless it is held by another name."""
        gone = self._held.pop((db, key), None)
        if gone is None:
            return
        names = self._names.get((db, gone.instance.key), set())
        names.discard(key)
        if not names:
            self._names.pop((db, gone.instance.key), None)
            self._answering(gone).release(gone.instance.key)

    def position(self, db: str, key: Hashable) -> tuple[str, int, int] | None:
        """Of one that is held: its prefix, the last change that mattered to it, and how far was looked."""
        held = self._held.get((db, key))
        if held is None:
            return None
        versions = self._answering(held).versions
        versions.advance()
        found = versions.last(held.instance.key)
        return None if found is None else (held.prefix, *found)

    def _answering(self, question: Asked) -> Answering:
        return self._queries.answering(question.db)


def _values(args: Args) -> list[Value] | dict[str, Value]:
    if isinstance(args, dict):
        return {name: from_lit(lit) for name, lit in args.items()}
    return [from_lit(lit) for lit in args]


def _url(query_id: str, args: bytes) -> str:
    """Return where the answer is available; `args` is JSON."""
    if args in (b"[]", b"{}"):
        return f"/api/v1/q/{query_id}"
    return f"/api/v1/q/{query_id}?args={quote(args.decode(), safe='')}"


def _bound(condition: Condition, args: Mapping[str, Value]) -> Condition:
    """`condition` with its arguments put in."""
    match condition:
        case Test(column, op, operands):
            return Test(
                column, op, tuple(Const(args[each.name]) if isinstance(each, Param) else each for each in operands)
            )
        case AllOf(parts):
            return AllOf(tuple(_bound(part, args) for part in parts))
        case AnyOf(parts):
            return AnyOf(tuple(_bound(part, args) for part in parts))
