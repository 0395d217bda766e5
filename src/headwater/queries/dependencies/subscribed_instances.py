"""Instances of queries that have subscribers; implements the protocols of feeds/query_feeds/query_instances.py."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from headwater.errors import InvalidRequest, NotSupported
from headwater.model.change import Change, Op
from headwater.model.dependencies.dependency import AllOf, AnyOf, Comparison, Condition, Const, Dependency, Param
from headwater.model.dependencies.description import Reason, of_condition
from headwater.model.formats import ANSWER_FORMATS
from headwater.model.literal import Value, from_lit
from headwater.model.principal import ADMIN, Principal
from headwater.model.query.query import AnswerHash
from headwater.model.row_msgpack import encode_row
from headwater.queries.answers import Answering
from headwater.queries.dependencies.instance_router import Router
from headwater.queries.dependencies.instances import Instance
from headwater.queries.etag.query_etag import QueryTag, read_tag
from headwater.queries.etag.row_etag import opaque
from headwater.queries.prepared import PreparedQuery
from headwater.queries.queries import Queries, check_reads
from headwater.sources.query import Queryable

ANY = ""  # any table
MAX_ARGS = 64 << 10  # bytes of the arguments of a query feed
Args = list[Any] | dict[str, Any]  # Lits


class AnalysedInstance:
    """A `QueryInstance` as analysed at `head` or later."""

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
        return self.instance.bound.matters(change)

    def reason(self, change: Change, dependency: int) -> Reason:
        if change.op is Op.SCHEMA_CHANGE:
            return Reason(change.table.name, None, "the definition of the table changed")
        if change.before is None and change.after is None:
            return Reason(change.table.name, None, "all rows of the table may have changed")
        return Reason(change.table.name, self._columns(change, dependency), self._condition(dependency))

    def _columns(self, change: Change, dependency: int) -> list[str] | None:
        seen = self.instance.analysis.dependencies[dependency].columns
        before, after = change.before, change.after
        if before is None or after is None:
            return None if seen is None else sorted(seen)
        pairs = zip(change.table.columns, before, after, strict=True)
        differ = [column.name for column, old, new in pairs if encode_row((old,)) != encode_row((new,))]
        return sorted(name for name in differ if seen is None or name in seen)

    def _condition(self, dependency: int) -> str:
        found = self._conditions.get(dependency)
        if found is None:
            condition = self.instance.analysis.dependencies[dependency].condition
            found = of_condition(_bound(condition, self.instance.args)) or "any row"
            self._conditions[dependency] = found
        return found

    def tag(self, offset: int) -> str:
        """Return the ETag, quoted, of the answer whose last relevant change is at `offset`."""
        return QueryTag(self.prefix, offset).write(weak=not self.instance.analysis.is_total)

    def offset_of(self, etag: str) -> int | None:
        """Return the offset of a tag of this instance; None if the tag belongs to another."""
        tag = read_tag(opaque(etag))
        if tag is None or all(tag.prefix != self.instance.prefix(format) for format in ANSWER_FORMATS):
            return None
        return tag.offset

    def answer(self) -> AnswerHash | None:
        """Execute the query now; blocks. Return None if the answer is truncated or not settled."""
        read = self._answering.read(self.instance)
        if read is None or read.truncated or not read.settled:
            return None
        digest = hashlib.blake2b(encode_row(read.columns), digest_size=16)
        for row in read.rows:
            digest.update(encode_row(row))
        return AnswerHash(read.offset, digest.digest())

    @property
    def is_guarded(self) -> bool:
        return self._answering.versions.is_guarded(self.instance.key)

    def steady(self, upto: int) -> int | None:
        return self._answering.versions.steady(self.instance.key, self.instance.bound, upto)


class UnusableInstance:
    """A `QueryInstance` whose query cannot run now, for example because a table or column that it reads is missing.

    Only a change of the schema can make it valid again.
    """

    tables: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ("a missing object ()",)  # in no scope: callers restricted to tables may not read it
    dependencies: tuple[Dependency, ...] = ()
    follows_all = False
    is_guarded = False

    def __init__(self, prepared: PreparedQuery, key: Hashable, url: str, head: int) -> None:
        self.query_id, self.db, self.key, self.url, self.head = prepared.id, prepared.db, key, url, head
        self.prefix = "lost-" + prepared.id[2:13].ljust(11, "0")  # no answer has a tag with this prefix
        self.wanted: tuple[str, ...] = ()  # tables of which every change is relevant

    def matters(self, change: Change) -> int | None:
        """Return 0, as for a first table reference, for any change of the schema; else None."""
        return 0 if change.op is Op.SCHEMA_CHANGE else None

    def reason(self, change: Change, dependency: int) -> Reason:
        return Reason(change.table.name, None, "the query could not be analysed before")

    def tag(self, offset: int) -> str:
        """Return a tag that matches no answer: this instance has none."""
        return QueryTag(self.prefix, offset).write()

    def offset_of(self, etag: str) -> int | None:
        """Return None: no tag belongs to this instance."""
        return None

    def answer(self) -> AnswerHash | None:
        """Return None: there is no answer."""
        return None

    def steady(self, upto: int) -> int | None:
        """Return None: no such offset is known."""
        return None


class VolatileInstance(UnusableInstance):
    """A query instance whose answers cannot be cached any more. A change of its tables or of the schema triggers it.

    If the query also reads data whose changes are not in the log, any change triggers it, so that no event is missed.
    """

    def __init__(self, instance: Instance, key: Hashable, url: str, head: int) -> None:
        super().__init__(instance.prepared, key, url, head)
        analysis = instance.analysis
        self.tables, self.beyond, self.dependencies = analysis.tables, analysis.beyond, analysis.dependencies
        self.wanted = (ANY,) if analysis.unseen else analysis.tables
        self.follows_all = bool(analysis.unseen)
        self.prefix = "none" + instance.prefix(ANSWER_FORMATS[0])[4:]  # no answer has a tag with this prefix
        relevant = "any change" if analysis.unseen else "every change of its tables"
        self._why = f"{relevant}: the answer is not cacheable, {'; '.join(analysis.volatile)}"

    def matters(self, change: Change) -> int | None:
        """Return 0, as for a first table reference, for any change of its tables or of the schema; else None."""
        if change.op is Op.SCHEMA_CHANGE or ANY in self.wanted or change.table.name in self.wanted:
            return 0
        return None

    def reason(self, change: Change, dependency: int) -> Reason:
        why = "the schema changed" if change.op is Op.SCHEMA_CHANGE else self._why
        return Reason(change.table.name, None, why)


class Routing:
    """Routes changes to subscribed instances. Not thread-safe."""

    def __init__(self, source: Queryable) -> None:
        self._router = Router(source)
        self._lost: dict[Hashable, tuple[str, ...]] = {}  # the tables of each instance that has no dependencies
        self._volatile: dict[str, dict[Hashable, None]] = {}  # keys of such instances by table

    def add(self, instance: Any) -> None:
        """Route relevant changes to the key of `instance`, in place of an earlier instance with this key."""
        self.remove(instance.key)
        if isinstance(instance, AnalysedInstance):
            self._router.add(instance.key, instance.instance.bound)
        else:
            wanted = self._lost[instance.key] = instance.wanted
            for table in wanted:
                self._volatile.setdefault(table, {})[instance.key] = None

    def remove(self, key: Hashable) -> None:
        """Stop routing to `key`; it need not be known."""
        self._router.remove(key)
        for table in self._lost.pop(key, ()):
            del self._volatile[table][key]
            if not self._volatile[table]:
                del self._volatile[table]

    def route(self, change: Change) -> list[tuple[Hashable, int]]:
        """Return the keys of the instances that `change` affects, each with its first affected table reference."""
        found = self._router.route(change)
        if not self._lost:
            return found
        if change.op is Op.SCHEMA_CHANGE:
            return [*found, *((key, 0) for key in self._lost)]
        others = (*self._volatile.get(change.table.name, ()), *self._volatile.get(ANY, ()))
        return [*found, *((key, 0) for key in others)]


class SubscribedInstances:
    """The instances that feeds subscribe to. Use it in the event loop, except `hold`."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._held: dict[tuple[str, Hashable], AnalysedInstance] = {}  # with the latest analysis
        # Keys of one instance: its arguments may be given by position and by name.
        self._names: dict[tuple[str, Hashable], set[Hashable]] = {}

    async def find(
        self, db: str | None, query_id: str, args: Args, *, who: Principal | None = None, strict: bool = True
    ) -> Any:
        """Return the instance as analysed now (see QueryInstances.find).

        Unless `strict`, a query that is invalid or not cacheable has an instance, too:
        `UnusableInstance` or `VolatileInstance`.
        """
        prepared = self._queries.get(who or ADMIN, query_id)
        if who is not None:
            await self._queries.allow(who, prepared)
        answering = self._queries.answering(prepared.db)
        key = query_id, msgspec.json.encode(args)
        if len(key[1]) > MAX_ARGS:
            raise InvalidRequest(
                f"the arguments of a query feed have more than {MAX_ARGS} bytes of JSON",
                hint="Shorten them: they are part of the address of the feed.",
            )
        url = _url(*key)
        head = 0 if strict else await answering.head()  # a schema change after it makes hubs analyse the query again
        try:
            instance, head = await answering.understood(prepared, _values(args))
            if who is not None:
                check_reads(who, prepared, instance.analysis)  # the schema may have changed since `allow`
            if not instance.analysis.is_cacheable:
                if not strict:
                    return VolatileInstance(instance, key, url, head)
                reasons = "; ".join(instance.analysis.volatile)
                raise NotSupported(
                    f"a query whose answer is not cacheable has no feed: {reasons}",
                    hint="Poll the query instead of subscribing to it.",
                )
        except InvalidRequest:
            if strict:
                raise
            return UnusableInstance(prepared, key, url, head)
        found = AnalysedInstance(instance, key, url, head, answering)
        if (prepared.db, key) in self._held:
            self._held[prepared.db, key] = found
        return found

    def routes(self, db: str) -> Routing:
        """Return an empty router for instances of `db`."""
        return Routing(self._queries.answering(db).database.source)

    def hold(self, db: str, instance: Any, *, last: int | None = None, since: int | None = None) -> None:
        """Track an instance, so that its tag is canonical until `release`. Callable from any thread."""
        if isinstance(instance, AnalysedInstance):
            self._held[db, instance.key] = instance
            self._names.setdefault((db, instance.instance.key), set()).add(instance.key)
            self._queries.answering(instance.db).hold(instance.instance, last=last, since=since)

    def release(self, db: str, key: Hashable) -> None:
        """Stop tracking an instance, unless it is held under another key."""
        gone = self._held.pop((db, key), None)
        if gone is None:
            return
        names = self._names.get((db, gone.instance.key), set())
        names.discard(key)
        if not names:
            self._names.pop((db, gone.instance.key), None)
            self._queries.answering(gone.db).release(gone.instance.key)

    def position(self, db: str, key: Hashable) -> tuple[str, int, int] | None:
        """Return tag prefix, last relevant change and last checked offset of a held instance; None if not held."""
        held = self._held.get((db, key))
        if held is None:
            return None
        versions = self._queries.answering(held.db).versions
        versions.advance()
        found = versions.last(held.instance.key)
        return None if found is None else (held.prefix, *found)


def _values(args: Args) -> list[Value] | dict[str, Value]:
    if isinstance(args, dict):
        return {name: from_lit(lit) for name, lit in args.items()}
    return [from_lit(lit) for lit in args]


def _url(query_id: str, args: bytes) -> str:
    """Return the URL path of the answer; `args` is JSON."""
    if args in (b"[]", b"{}"):
        return f"/api/v1/q/{query_id}"
    return f"/api/v1/q/{query_id}?args={quote(args.decode(), safe='')}"


def _bound(condition: Condition, args: Mapping[str, Value]) -> Condition:
    """Return `condition` with constants in place of its parameters."""
    match condition:
        case Comparison(column, op, operands):
            return Comparison(
                column, op, tuple(Const(args[each.name]) if isinstance(each, Param) else each for each in operands)
            )
        case AllOf(parts) | AnyOf(parts):
            return type(condition)(tuple(_bound(part, args) for part in parts))
