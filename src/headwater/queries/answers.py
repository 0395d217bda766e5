"""Answers to prepared queries: executed, or found to be what the asker has. Never the latter when it would differ."""

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
from headwater.model.answer_limits import bytes_of
from headwater.model.dependencies.dependency import ALWAYS, Analysis, KeyGuard
from headwater.model.literal import Value
from headwater.model.row_msgpack import encode_row
from headwater.queries.dependencies.bound_dependencies import bind
from headwater.queries.dependencies.guards import GuardState
from headwater.queries.dependencies.instance_versions import MAX_BEHIND, Versions
from headwater.queries.dependencies.instances import (
    Analyses,
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
from headwater.queries.head_checks import Looks, Run, Seen
from headwater.queries.prepared import Prepared
from headwater.queries.uncacheable_reasons import Reasons
from headwater.sources.query import Read
from headwater.sources.read import Look

FLOOR_SECONDS = 2.0  # longest wait for a change that somebody has seen
ATTEMPTS = 5  # at a schema that is being changed all the time
WATCH_AFTER = 2  # requests for one instance, from which on its changes are tracked
MAX_WATCHED = 10_000  # instances that are tracked because they are asked for
MAX_UNGUARDED = 3  # answers without guards, after which no more are asked for: there are too many keys


PRECISIONS = ("row", "column", "table", "none")  # down to which dependencies are known; of none nothing is kept
MAX_COMPARED = 1 << 20  # bytes of an answer that is compared with the next one
ENCODED_AT_ONCE = 64 << 10  # bytes of arguments that the loop encodes itself

T = TypeVar("T")


class Answer(msgspec.Struct, frozen=True):
    """What a query said, at `offset`; without rows where the asker has them already."""

    instance: Instance
    offset: int
    etag: str | None = None  # none of a query whose answers cannot be kept
    read: Read | None = None
    matched: str = ""  # of the asker's tags the one that is current, as it stands in its quotes
    seen: dict[str, int] = {}  # of each table the offset of its last change
    shared: bool = False  # it came of another request's execution

    @property
    def not_modified(self) -> bool:
        """Whether what the asker has is current."""
        return self.read is None


class Numbers(msgspec.Struct):
    """What was answered, for metrics."""

    asked: int = 0
    conditional: int = 0  # askers that had an answer already
    not_modified: int = 0
    executed: int = 0
    shared: int = 0  # answers that came of another request's execution
    uncacheable: int = 0
    tags: int = 0  # that were made or looked at
    tag_seconds: float = 0.0  # it took
    analysed: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(PRECISIONS, 0))
    places: int = 0  # of tables in the queries analysed
    compared: int = 0  # answers that went stale and were compared with the next
    unchanged: int = 0  # of those were the same all the same
    reasons: Reasons = msgspec.field(default_factory=Reasons)

    def again(self) -> None:
        """One more asker had what is current, as before."""
        self.asked += 1
        self.conditional += 1
        self.not_modified += 1

    def analysis(self, found: Analysis) -> None:
        """One more query was understood."""
        self.analysed[_precision(found)] += 1
        self.reasons.analysed(found)
        self.places += len(found.dependencies)


def _precision(found: Analysis) -> str:
    if not found.is_cacheable:
        return "none"
    if any(place.condition != ALWAYS for place in found.dependencies):
        return "row"
    return "column" if any(place.columns is not None for place in found.dependencies) else "table"


def _moment(seen: Seen) -> tuple[int, ...]:
    """Equal for looks of which one may have what was read after the other."""
    is_whole = seen.is_caught_up and seen.look.settled
    return (seen.look.head, seen.look.schema) if is_whole else (seen.number,)


def _newest_first(tags: Sequence[str], prefix: str) -> list[tuple[str, QueryTag]]:
    """Return the tags that have `prefix`, as they were sent and as they read."""
    found = [(opaque, tag) for opaque in tags if (tag := read_tag(opaque)) is not None and tag.prefix == prefix]
    return sorted(found, key=lambda one: -one[1].offset)


class Answering:
    """The queries of one database. In one loop; what blocks is run in threads."""

    def __init__(self, database: Database, run: Run, numbers: Numbers, *, sample: int = 0) -> None:
        self.database, self._run, self.numbers, self._sample = database, run, numbers, sample
        self._instances = Instances()
        self._analyses = Analyses()
        self._generation = database.log.generation  # in another one the schema may be any
        self._flights: dict[Hashable, asyncio.Task[Read | None]] = {}
        self._watched: dict[Hashable, None] = {}  # because they are asked for, the oldest first
        self._held: dict[Hashable, Instance] = {}  # subscribed
        self.versions = Versions(database.source, database.log)
        self.tables = TableVersions(database.log)
        self._looks = Looks(database, self._advance, lambda: self.versions.is_near and self.tables.is_near)

    def _advance(self) -> None:
        self.versions.advance()
        self.tables.advance()

    async def _at_once(self, work: Callable[[], T]) -> T | None:
        """Run `work`, which uses the versions, in the loop; None where other threads keep the versions locked.

        The loop never waits for that lock, because a thread that takes in a large transaction has it for long.
        """
        for is_last in (False, True):
            with self.versions.try_hold() as is_held:
                if is_held:
                    return work()
            if not is_last:
                await self._looks.catch_up(self.versions.catch_up)
        return None

    async def _with_tables(self, work: Callable[..., T], *args: object) -> T:
        """Run `work`, which uses the table versions: in a thread if the loop would have to wait for them."""
        with self.tables.try_hold() as is_held:
            if is_held:
                return work(*args)
        found: T = await self._run(work, *args)
        return found

    def close(self) -> None:
        """Keep what would take long to find out again. It waits for the disk."""
        with suppress(HeadwaterError):
            self.tables.advance()
            self.tables.save(every=1)

    # --- asking ----------------------------------------------------------------------------------------------

    async def ask(
        self,
        prepared: Prepared,
        args: Args,
        *,
        format: str,
        tags: Sequence[str] = (),
        floor: Token | None = None,
    ) -> Answer:
        """The answer, or that one of `tags` (as they stand inside their quotes) is current.

        PreconditionFailed where `floor` is not reached within two seconds.
        """
        self.numbers.asked += 1
        for _ in range(ATTEMPTS):
            seen = await self._looks.look()
            instance = await self.instance(prepared, args, seen.look)
            if floor is not None:
                await self._rise(floor, instance.analysis.tables)
                seen = await self._looks.look()  # a run that began before may lack what was waited for
                instance = await self.instance(prepared, args, seen.look)
            if not instance.analysis.is_cacheable:
                self.numbers.uncacheable += 1
                self.numbers.reasons.answered(instance.analysis)
                tags = ()
            if tags and (known := await self._known(instance, format, tags, seen)) is not None:
                return known
            read, shared = await self._executed(instance, seen)
            if read is not None:
                answer = await self._answer(instance, format, read)
                return msgspec.structs.replace(answer, shared=True) if shared else answer
            self._analyses.pop(prepared.id)  # the schema moved between the look and the read
        raise Busy("the schema is being changed", hint="Try again in a moment.")

    def moment(self) -> Hashable:
        """Where the database stands: equal as long as nothing at all was committed; None where that is not seen."""
        seen = self._looks.glance()
        return None if seen is None else (self.database.log.generation, seen.look.head, seen.look.schema)

    async def _known(self, instance: Instance, format: str, tags: Sequence[str], seen: Seen) -> Answer | None:
        self.numbers.conditional += 1
        instance.returned = True
        if not (seen.is_caught_up and seen.look.settled):
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
        """Return the tag that is current, and the offset up to which it is known to be.

        Only the newest tag that is not of the future is checked: where it is not current, no older one is. So a
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
        """Return the tag to check, whether it is current, and how far the log was looked at.

        Not whether it is current where many changes have to be scanned for that.
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

    async def _executed(self, instance: Instance, seen: Seen) -> tuple[Read | None, bool]:
        """Run it, once for all who ask the same at the same moment of the database."""
        key = (instance.key, *_moment(seen))
        flight = self._flights.get(key)
        if flight is not None:
            self.numbers.shared += 1
            with suppress(Busy):  # of the caller who began it, perhaps: each asks by itself then
                return await asyncio.shield(flight), True
            return await self._execute(instance), False
        flight = self._flights[key] = asyncio.create_task(self._execute(instance))
        flight.add_done_callback(lambda _: self._flights.pop(key, None))
        return await asyncio.shield(flight), False

    async def _execute(self, instance: Instance) -> Read | None:
        self.numbers.executed += 1
        if instance.asked >= WATCH_AFTER:
            await self._at_once(lambda: self._watch(instance))  # before it is read, so that guards are kept
        found: Read | None = await self._run(self._read, instance)
        return found

    def read(self, instance: Instance) -> Read | None:
        """Ask now; blocks. What that tells about later changes is kept for who is watched. From any thread."""
        source, analysis, versions = self.database.source, instance.analysis, self.versions
        is_wanted = self._can_use_guards(instance) and versions.wants_guards(instance.key, instance.bound)
        found = source.answer(analysis, instance.args, guards=is_wanted)
        if is_wanted and found is not None and found.settled:
            state = GuardState.record(source, instance.tables, analysis, instance.args, instance.bound, found)
            is_in_vain = not state and any(isinstance(guard, KeyGuard) for guard in analysis.guards)
            instance.unguarded = instance.unguarded + 1 if is_in_vain else 0
            versions.guard(instance.key, instance.bound, state, found.offset)
        return found

    def _can_use_guards(self, instance: Instance) -> bool:
        is_asked_about = instance.returned or instance.key in self._held
        return is_asked_about and bool(instance.analysis.guards) and instance.unguarded < MAX_UNGUARDED

    def _read(self, instance: Instance) -> Read | None:
        found = self.read(instance)
        with suppress(HeadwaterError):  # a full disk does not keep answers from anybody
            self.tables.save()
        return found

    async def _answer(self, instance: Instance, format: str, read: Read) -> Answer:
        known = await self._seen(instance, read.offset)
        if not instance.analysis.is_cacheable or not read.settled:
            return Answer(instance, read.offset, None, read, seen=known)
        with self._timed():
            position = await self._at_once(lambda: self._position(instance, read.offset))
            tag = QueryTag(instance.prefix(format), read.offset if position is None else position)
        if self._sample and hash(instance.key) % self._sample == 0:
            self._compare(instance, tag.offset, read)
        return Answer(instance, read.offset, tag.write(weak=not instance.analysis.is_total), read, seen=known)

    def _compare(self, instance: Instance, position: int, read: Read) -> None:
        """Whether what made the last answer stale made it another one: that tells how precise we are."""
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

    async def _rise(self, floor: Token, tables: Sequence[str]) -> None:
        """Wait, for a while, until the log has what a writer or an earlier reader has seen."""
        wanted = floor_of(floor, self.database.source.name, tables)
        reached = await self._with_tables(self._tables_reached, tables)
        ahead = lacking(wanted, reached)
        if ahead:
            await self._run(self.database.reach, max(ahead.values()), FLOOR_SECONDS)
            reached = await self._with_tables(self._tables_reached, tables)
        demand(wanted, reached, began=self.database.log.generation_first)

    def _position(self, instance: Instance, offset: int) -> int:
        """Where the last change that mattered stands, if that is known; else where the answer was read."""
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
        """It is subscribed: its tag is canonical until `release`. See `Versions.watch`. From any thread."""
        self._held[instance.key] = instance
        if last is not None or self.versions.last(instance.key) is None:
            self.versions.watch(instance.key, instance.bound, last=last, since=since)

    def release(self, key: Hashable) -> None:
        """Nobody subscribes to it any more."""
        self._held.pop(key, None)
        if key not in self._watched:
            self.versions.forget(key)

    async def understood(self, prepared: Prepared, args: Args) -> tuple[Instance, int]:
        """The query with these arguments as it is understood now, and an offset that was reached by then."""
        seen = await self._looks.look()
        head = self._reached(seen)
        return await self.instance(prepared, args, seen.look), head

    async def meaning(self, prepared: Prepared) -> Analysis:
        """What the query depends on now, whatever its arguments."""
        seen = await self._looks.look()
        return (await self.analysis(prepared, seen.look))[0]

    async def head(self) -> int:
        """An offset that is reached now."""
        return self._reached(await self._looks.look())

    def _reached(self, seen: Seen) -> int:
        """Where the log ends everything can be read, changes of the schema too; a head may lie beyond that."""
        return min(seen.look.head, self.database.log.latest)

    # --- understanding ---------------------------------------------------------------------------------------

    async def instance(self, prepared: Prepared, args: Args, look: Look) -> Instance:
        """The query with these arguments, understood as of `look` or later."""
        analysis, schema = await self.analysis(prepared, look)
        named = named_args(analysis.parameters, args)
        if args_size(named) <= ENCODED_AT_ONCE:
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
        prepared: Prepared,
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
        if made.key in self._held:  # what mattered to it before may not be what matters now
            self.versions.advance()
            known = self.versions.last(made.key)
            last = None if known is None else known[0]
            self.versions.watch(made.key, bound, last=last, since=last)
        return made

    async def analysis(self, prepared: Prepared, look: Look) -> tuple[Analysis, int]:
        """What the query depends on, and a state of the schema in which that holds, not before `look`."""
        if self._generation != self.database.log.generation:
            self._generation, self._analyses = self.database.log.generation, Analyses()
        known = self._analyses.get(prepared.id)
        if known is not None and known[1] == look.schema:
            return known
        found: tuple[Analysis, int] = await self._run(self._analysed, prepared)
        if known is not None and known[0].epoch == found[0].epoch:
            found = known[0], found[1]  # what moved was something else
        self._analyses.put(prepared, *found)
        self.numbers.analysis(found[0])
        return found

    def _analysed(self, prepared: Prepared) -> tuple[Analysis, int]:
        source = self.database.source
        for _ in range(ATTEMPTS):
            before = source.look().schema
            analysis = source.analyse(prepared.sql)
            if source.look().schema == before:
                return analysis, before
        raise Busy("the schema is being changed", hint="Try again in a moment.")
