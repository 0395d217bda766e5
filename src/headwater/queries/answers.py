"""Answers to prepared queries: the rows, or `not modified` when the client's tag is still current.

A client whose rows may have changed never receives `not modified`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from headwater.database import Database
from headwater.errors import Busy, HeadwaterError
from headwater.model.bounded_cache import BoundedCache
from headwater.model.dependencies.dependency import ALWAYS, Analysis, KeyGuard
from headwater.model.literal import Value
from headwater.model.row_msgpack import encode_row
from headwater.model.work.answer_limits import bytes_of
from headwater.queries.dependencies.bound_dependencies import bind
from headwater.queries.dependencies.guards import GuardState
from headwater.queries.dependencies.instance_versions import MAX_BEHIND, InstanceVersions
from headwater.queries.dependencies.instances import (
    CELL,
    MAX_BYTES,
    TEXT_FACTOR,
    Args,
    Instance,
    InstanceKey,
    Instances,
    args_size,
    instance_key,
    named_args,
)
from headwater.queries.etag.causality import Token, demand, floor_of, lacking
from headwater.queries.etag.query_etag import QueryTag, read_tag
from headwater.queries.etag.table_versions import TableVersions
from headwater.queries.head_checks import HeadCheck, HeadChecks, Run
from headwater.queries.prepared import PreparedQuery
from headwater.queries.uncacheable_reasons import Reasons
from headwater.sources.query import ReadResult
from headwater.sources.read import SourceHead

FLOOR_SECONDS = 2.0  # longest wait until the log reaches the floor of a request
MAX_ANALYSES = 10_000
ATTEMPTS = 5  # executions of one request while the schema keeps changing
WATCH_AFTER = 2  # requests for one instance, after which its changes are tracked
MAX_WATCHED = 10_000  # instances tracked because clients request them
MAX_UNGUARDED = 3  # answers in a row without guards, after which no guards are requested: there are too many keys


PRECISIONS = ("row", "column", "table", "none")  # how precisely dependencies are known; `none` is not cacheable
MAX_COMPARED = 1 << 20  # largest answer, in bytes, that is compared with the next answer
ENCODED_AT_ONCE = 64 << 10  # bytes of arguments that the event loop encodes itself; more are encoded in a thread

T = TypeVar("T")


class Answer(msgspec.Struct, frozen=True):
    """The result of a query at `offset`; without rows when the client's copy is current."""

    instance: Instance
    offset: int
    etag: str | None = None  # None if the answer is not cacheable
    read: ReadResult | None = None
    matched: str = ""  # the client's tag that is current, without its quotes
    seen: dict[str, int] = {}  # offset of the last change of each table
    shared: bool = False  # another request executed the query

    @property
    def not_modified(self) -> bool:
        """Return whether the client's copy is current."""
        return self.read is None


class QueryCounters(msgspec.Struct):
    """Counters of requests and answers, for metrics."""

    asked: int = 0
    conditional: int = 0  # requests that sent the tag of an earlier answer
    not_modified: int = 0
    executed: int = 0
    shared: int = 0  # answers that another request's execution provided
    uncacheable: int = 0
    tags: int = 0  # tags made or checked
    tag_seconds: float = 0.0  # time spent making and checking tags
    analysed: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(PRECISIONS, 0))
    places: int = 0  # table references in the analysed queries
    compared: int = 0  # stale answers that were compared with the next answer
    unchanged: int = 0  # compared answers that were equal: invalidations after which the result was unchanged
    reasons: Reasons = msgspec.field(default_factory=Reasons)

    def again(self) -> None:
        """Count a request answered `not modified` from the cache of such answers, without a call of `ask`."""
        self.asked += 1
        self.conditional += 1
        self.not_modified += 1

    def analysis(self, found: Analysis) -> None:
        """Count one more analysed query."""
        self.analysed[_precision(found)] += 1
        self.reasons.analysed(found)
        self.places += len(found.dependencies)


def _precision(found: Analysis) -> str:
    if not found.is_cacheable:
        return "none"
    if any(place.condition != ALWAYS for place in found.dependencies):
        return "row"
    return "column" if any(place.columns is not None for place in found.dependencies) else "table"


def _no_analyses() -> BoundedCache[str, tuple[Analysis, int]]:
    """Return an empty cache of analyses by query id, each with a schema version for which it holds."""
    return BoundedCache(MAX_ANALYSES, MAX_BYTES)


def _moment(check: HeadCheck) -> tuple[int, ...]:
    """Return a key that is equal for head checks whose requests may share one execution."""
    is_whole = check.is_caught_up and check.source_head.settled
    return (check.source_head.head, check.source_head.schema) if is_whole else (check.number,)


def _newest_first(tags: Sequence[str], prefix: str) -> list[tuple[str, QueryTag]]:
    """Return the tags with `prefix`, each as sent and parsed, the highest offset first."""
    found = [(opaque, tag) for opaque in tags if (tag := read_tag(opaque)) is not None and tag.prefix == prefix]
    return sorted(found, key=lambda one: -one[1].offset)


class Answering:
    """Answers the queries of one database. Runs in one event loop; blocking work runs in threads."""

    def __init__(self, database: Database, run: Run, numbers: QueryCounters, *, sample: int = 0) -> None:
        self.database, self._run, self.numbers, self._sample = database, run, numbers, sample
        self._instances = Instances()
        self._analyses = _no_analyses()
        self._generation = database.log.generation  # analyses do not outlive it: another one may have any schema
        self._flights: dict[Hashable, asyncio.Task[ReadResult | None]] = {}
        self._watched: dict[Hashable, None] = {}  # instances tracked because clients request them, the oldest first
        self._held: dict[Hashable, Instance] = {}  # instances with subscribers
        self.versions = InstanceVersions(database.source, database.log)
        self.tables = TableVersions(database.log)
        self._head_checks = HeadChecks(database, self._advance, lambda: self.versions.is_near and self.tables.is_near)

    def _advance(self) -> None:
        self.versions.advance()
        self.tables.advance()

    async def _at_once(self, work: Callable[[], T]) -> T | None:
        """Run `work`, which uses the versions, in the loop; return None if another thread keeps the versions locked.

        The loop never waits for that lock: a thread that applies a large transaction holds it for long.
        """
        for is_last in (False, True):
            with self.versions.try_hold() as is_held:
                if is_held:
                    return work()
            if not is_last:
                await self._head_checks.catch_up(self.versions.catch_up)
        return None

    async def _with_tables(self, work: Callable[..., T], *args: object) -> T:
        """Run `work`, which uses the table versions: in a thread if another thread has them locked."""
        with self.tables.try_hold() as is_held:
            if is_held:
                return work(*args)
        found: T = await self._run(work, *args)
        return found

    def close(self) -> None:
        """Save the table versions, which are slow to compute again. Blocks on the disk."""
        with suppress(HeadwaterError):
            self.tables.advance()
            self.tables.save(every=1)

    # --- asking ----------------------------------------------------------------------------------------------

    async def ask(
        self,
        prepared: PreparedQuery,
        args: Args,
        *,
        format: str,
        tags: Sequence[str] = (),
        floor: Token | None = None,
    ) -> Answer:
        """Return the answer, or an answer without rows if one of `tags` (without their quotes) is current.

        Raise PreconditionFailed if the log does not reach `floor` within two seconds.
        """
        self.numbers.asked += 1
        for _ in range(ATTEMPTS):
            check = await self._head_checks.check()
            instance = await self.instance(prepared, args, check.source_head)
            if floor is not None:
                await self._wait_for_floor(floor, instance.analysis.tables)
                # An execution that began before the wait may lack the awaited changes.
                check = await self._head_checks.check()
                instance = await self.instance(prepared, args, check.source_head)
            if not instance.analysis.is_cacheable:
                self.numbers.uncacheable += 1
                self.numbers.reasons.answered(instance.analysis)
                tags = ()
            if tags and (known := await self._known(instance, format, tags, check)) is not None:
                return known
            read, shared = await self._executed(instance, check)
            if read is not None:
                answer = await self._answer(instance, format, read)
                return msgspec.structs.replace(answer, shared=True) if shared else answer
            self._analyses.pop(prepared.id)  # the schema changed between the head check and the read
        raise Busy("the schema keeps changing", hint="Retry in a moment.")

    def moment(self) -> Hashable:
        """Return a key that stays equal until the next commit; None if the head is not available without a thread."""
        check = self._head_checks.peek()
        if check is None:
            return None
        return self.database.log.generation, check.source_head.head, check.source_head.schema

    async def _known(self, instance: Instance, format: str, tags: Sequence[str], check: HeadCheck) -> Answer | None:
        self.numbers.conditional += 1
        instance.returned = True
        if not (check.is_caught_up and check.source_head.settled):
            return None
        with self._timed():
            found = await self._found(instance, _newest_first(tags, instance.prefix(format)))
        if found is None:
            return None
        self.numbers.not_modified += 1
        opaque, tag, reached = found
        etag = tag.write(weak=not instance.analysis.is_total)
        return Answer(instance, tag.offset, etag, matched=opaque, seen=await self._seen(instance, reached))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.numbers.tags += 1
        self.numbers.tag_seconds += time.perf_counter() - started

    async def _found(self, instance: Instance, tags: list[tuple[str, QueryTag]]) -> tuple[str, QueryTag, int] | None:
        """Return the current tag as sent and parsed, and the offset up to which it is known to be current.

        Only the newest tag at or below the reached offset is checked: if it is stale, every older one is. So a
        request costs one scan of the log at most.
        """
        judged = await self._at_once(lambda: self._judge(instance, tags)) if tags else None
        if judged is None:
            return None
        opaque, tag, is_current, reached = judged
        if is_current is None:
            is_current = await self._run(self.versions.is_current, instance.key, instance.bound, tag.offset)
        return (opaque, tag, reached) if is_current else None

    def _judge(
        self, instance: Instance, tags: list[tuple[str, QueryTag]]
    ) -> tuple[str, QueryTag, bool | None, int] | None:
        """Return the tag to check, whether it is current, and the offset up to which the log was read.

        The verdict is None if it takes a scan of many changes, in a thread. Return None if no tag can be checked.
        """
        reached, versions = self.versions.advance(), self.versions
        if self.database.log.generation != instance.generation:
            return None
        chosen = next(((opaque, tag) for opaque, tag in tags if tag.offset <= reached), None)
        if chosen is None:
            return None
        place = instance.key, instance.bound, chosen[1].offset
        is_quick = reached - chosen[1].offset <= MAX_BEHIND or versions.is_known(*place)
        return *chosen, versions.is_current(*place) if is_quick else None, reached

    async def _executed(self, instance: Instance, check: HeadCheck) -> tuple[ReadResult | None, bool]:
        """Execute the query once for all requests of this instance at the same head; return whether it was shared."""
        key = (instance.key, *_moment(check))
        flight = self._flights.get(key)
        if flight is not None:
            self.numbers.shared += 1
            with suppress(Busy):  # Busy may be a limit of the caller that started it: then each executes by itself
                return await asyncio.shield(flight), True
            return await self._execute(instance), False
        flight = self._flights[key] = asyncio.create_task(self._execute(instance))
        flight.add_done_callback(lambda _: self._flights.pop(key, None))
        return await asyncio.shield(flight), False

    async def _execute(self, instance: Instance) -> ReadResult | None:
        self.numbers.executed += 1
        if instance.asked >= WATCH_AFTER:
            await self._at_once(lambda: self._watch(instance))  # before the read: guards of unwatched ones are dropped
        found: ReadResult | None = await self._run(self._read, instance)
        return found

    def read(self, instance: Instance) -> ReadResult | None:
        """Return the answer of now, None if the schema has changed; record its guards if they are wanted. Blocks."""
        source, analysis, versions = self.database.source, instance.analysis, self.versions
        is_asked_about = instance.returned or instance.key in self._held
        can_use_guards = is_asked_about and bool(analysis.guards) and instance.unguarded < MAX_UNGUARDED
        is_wanted = can_use_guards and versions.wants_guards(instance.key, instance.bound)
        found = source.answer(analysis, instance.args, guards=is_wanted)
        if is_wanted and found is not None and found.settled:
            state = GuardState.record(source, instance.tables, analysis, instance.args, instance.bound, found)
            is_in_vain = not state and any(isinstance(guard, KeyGuard) for guard in analysis.guards)
            instance.unguarded = instance.unguarded + 1 if is_in_vain else 0
            versions.guard(instance.key, instance.bound, state, found.offset)
        return found

    def _read(self, instance: Instance) -> ReadResult | None:
        found = self.read(instance)
        with suppress(HeadwaterError):  # a full disk must not fail the answer
            self.tables.save()
        return found

    async def _answer(self, instance: Instance, format: str, read: ReadResult) -> Answer:
        known = await self._seen(instance, read.offset)
        if not instance.analysis.is_cacheable or not read.settled:
            return Answer(instance, read.offset, None, read, seen=known)
        with self._timed():
            position = await self._at_once(lambda: self._position(instance, read.offset))
            tag = QueryTag(instance.prefix(format), read.offset if position is None else position)
        if self._sample and hash(instance.key) % self._sample == 0:
            self._compare(instance, tag.offset, read)
        return Answer(instance, read.offset, tag.write(weak=not instance.analysis.is_total), read, seen=known)

    def _compare(self, instance: Instance, position: int, read: ReadResult) -> None:
        """Count whether the answer differs from the last stale one: unchanged answers were invalidated for nothing."""
        if bytes_of(read.rows) > MAX_COMPARED:
            return
        rows = list(map(encode_row, read.rows))
        digest = hashlib.blake2b(b"".join(rows if instance.analysis.is_total else sorted(rows))).digest()
        if instance.digest is not None and instance.digest[0] != position:
            self.numbers.compared += 1
            self.numbers.unchanged += instance.digest[1] == digest
        instance.digest = position, digest

    async def _seen(self, instance: Instance, offset: int) -> dict[str, int]:
        return await self._with_tables(self._tables_at, instance.analysis.tables, offset)

    def _tables_at(self, tables: Sequence[str], offset: int) -> dict[str, int]:
        self.tables.advance()
        return self.tables.at(tables, offset)

    def _tables_reached(self, tables: Sequence[str]) -> dict[str, int]:
        self.tables.advance()
        return self.tables.reached(tables)

    async def _wait_for_floor(self, floor: Token, tables: Sequence[str]) -> None:
        """Wait up to FLOOR_SECONDS until the log reaches `floor`; raise PreconditionFailed otherwise."""
        wanted = floor_of(floor, self.database.source.name, tables)
        reached = await self._with_tables(self._tables_reached, tables)
        ahead = lacking(wanted, reached)
        if ahead:
            await self._run(self.database.reach, max(ahead.values()), FLOOR_SECONDS)
            reached = await self._with_tables(self._tables_reached, tables)
        demand(wanted, reached, began=self.database.log.generation_first)

    def _position(self, instance: Instance, offset: int) -> int:
        """Return the offset of the last relevant change, if it is known; else the offset of the read."""
        if self.database.log.generation != instance.generation:
            return offset
        self.versions.advance()
        if instance.asked >= WATCH_AFTER:
            self._watch(instance)
        known = self.versions.last(instance.key)
        return known[0] if known is not None and known[0] <= offset <= known[1] else offset

    def _watch(self, instance: Instance) -> None:
        if self.versions.last(instance.key) is None and self._instances.holds(instance):
            self.versions.watch(instance.key, instance.bound)
            self._watched[instance.key] = None
            if len(self._watched) > MAX_WATCHED:
                self._unwatch(next(iter(self._watched)))

    def _unwatch(self, key: Hashable) -> None:
        if self._watched.pop(key, self) is None and key not in self._held:
            self.versions.forget(key)

    # --- subscribed ------------------------------------------------------------------------------------------

    def hold(self, instance: Instance, *, last: int | None = None, since: int | None = None) -> None:
        """Track a subscribed instance, so that its tag is canonical until `release`. Callable from any thread.

        For `last` and `since` see `InstanceVersions.watch`.
        """
        self._held[instance.key] = instance
        if last is not None or self.versions.last(instance.key) is None:
            self.versions.watch(instance.key, instance.bound, last=last, since=since)

    def release(self, key: Hashable) -> None:
        """Stop tracking an instance that has no subscribers left, unless requests keep it tracked."""
        self._held.pop(key, None)
        if key not in self._watched:
            self.versions.forget(key)

    async def understood(self, prepared: PreparedQuery, args: Args) -> tuple[Instance, int]:
        """Return the instance, analysed now, and an offset that the log had reached before that."""
        check = await self._head_checks.check()
        head = self._reached(check)
        return await self.instance(prepared, args, check.source_head), head

    async def meaning(self, prepared: PreparedQuery) -> Analysis:
        """Return the current analysis of the query, for any arguments."""
        check = await self._head_checks.check()
        return (await self.analysis(prepared, check.source_head))[0]

    async def head(self) -> int:
        """Return an offset that the log has reached now."""
        return self._reached(await self._head_checks.check())

    def _reached(self, check: HeadCheck) -> int:
        """Return the head, or the end of the log where the head is ahead: only logged changes can be read."""
        return min(check.source_head.head, self.database.log.latest)

    # --- instances and analyses ------------------------------------------------------------------------------

    async def instance(self, prepared: PreparedQuery, args: Args, source_head: SourceHead) -> Instance:
        """Return the instance of the query with `args`, analysed as of `source_head` or later."""
        analysis, schema = await self.analysis(prepared, source_head)
        named = named_args(analysis.parameters, args)
        if len(named) * CELL <= ENCODED_AT_ONCE and args_size(named) <= ENCODED_AT_ONCE:
            key = instance_key(prepared.id, named)
        else:
            key = await self._run(instance_key, prepared.id, named)
        generation = self.database.log.generation
        known = self._instances.get(key) or self._held.get(key)
        if known is not None and known.analysis is analysis and known.generation == generation:
            known.schema = schema
            return known
        if known is not None:
            self._unwatch(key)
        made: Instance = await self._run(self._bound, prepared, analysis, named, generation, schema, key)
        if key in self._held:
            self._held[key] = made
        for forgotten in self._instances.put(made):
            self._unwatch(forgotten)
        return made

    def _bound(
        self,
        prepared: PreparedQuery,
        analysis: Analysis,
        args: dict[str, Value],
        generation: str,
        schema: int,
        key: InstanceKey,
    ) -> Instance:
        source = self.database.source
        tables = source.describe()
        bound = bind(source, tables, analysis, args)
        made = Instance(prepared, analysis, args, bound, tables=tables, generation=generation, schema=schema, key=key)
        if made.key in self._held:  # other changes may be relevant by the new analysis: scan from the last one again
            self.versions.advance()
            known = self.versions.last(made.key)
            last = None if known is None else known[0]
            self.versions.watch(made.key, bound, last=last, since=last)
        return made

    async def analysis(self, prepared: PreparedQuery, source_head: SourceHead) -> tuple[Analysis, int]:
        """Return the analysis of the query, and a schema version, not older than `source_head`, for which it holds."""
        if self._generation != self.database.log.generation:
            self._generation, self._analyses = self.database.log.generation, _no_analyses()
        known = self._analyses.get(prepared.id)
        if known is not None and known[1] == source_head.schema:
            return known
        found: tuple[Analysis, int] = await self._run(self._analysed, prepared)
        if known is not None and known[0].epoch == found[0].epoch:
            found = known[0], found[1]  # the schema change did not affect this query
        self._analyses.put(prepared.id, found, TEXT_FACTOR * len(prepared.sql))
        self.numbers.analysis(found[0])
        return found

    def _analysed(self, prepared: PreparedQuery) -> tuple[Analysis, int]:
        source = self.database.source
        for _ in range(ATTEMPTS):
            before = source.read_head().schema
            analysis = source.analyse(prepared.sql)
            if source.read_head().schema == before:
                return analysis, before
        raise Busy("the schema keeps changing", hint="Retry in a moment.")
