"""Instances, each a prepared query with its arguments, and a cache of instances."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence

import msgspec

from headwater.errors import InvalidRequest
from headwater.model.dependencies.dependency import Analysis
from headwater.model.literal import UNAVAILABLE, Value
from headwater.model.table import Table
from headwater.queries.dependencies.bound_dependencies import BoundDependencies
from headwater.queries.etag.query_etag import pack_args, tag_prefix
from headwater.queries.prepared import PreparedQuery

MAX_INSTANCES = 20_000  # cached between requests
MAX_ARGS_BYTES = 32 << 10  # of the arguments of a cached instance
MAX_BYTES = 64 << 20  # of the arguments and texts of all cached instances
TEXT_FACTOR = 4  # an analysis takes several times the memory of its text
CELL = 32  # bytes of memory per argument in addition to its value

Args = Sequence[Value] | Mapping[str, Value]
InstanceKey = tuple[str, tuple[str, ...], bytes]  # the query's id, the names of its arguments, and their values


class Instance:
    """One query with its arguments, as analysed for one schema version and one generation of the log."""

    __slots__ = (
        "analysis",
        "args",
        "asked",
        "bound",
        "digest",
        "generation",
        "key",
        "prefixes",
        "prepared",
        "returned",
        "schema",
        "size",
        "tables",
        "unguarded",
    )

    def __init__(
        self,
        prepared: PreparedQuery,
        analysis: Analysis,
        args: dict[str, Value],
        bound: BoundDependencies,
        *,
        tables: Mapping[str, Table],
        generation: str,
        schema: int,
        key: InstanceKey | None = None,
    ) -> None:
        self.prepared, self.analysis, self.args, self.bound = prepared, analysis, args, bound
        # The tables at the time of binding, which only guards need later.
        self.tables = {name: tables[name] for name in analysis.tables if name in tables} if analysis.guards else {}
        self.generation = generation  # of the log
        self.schema = schema  # the newest schema version for which the analysis is known to hold
        self.key = instance_key(prepared.id, args) if key is None else key
        self.size = args_size(args)
        self.prefixes: dict[str, str] = {}
        self.asked = 0  # number of requests while the instance was cached
        self.returned = False  # a client sent a tag of an earlier answer
        self.unguarded = 0  # answers in a row for which guards were requested and none could be recorded
        self.digest: tuple[int, bytes] | None = None  # position and hash of the last answer, if answers are compared

    def prefix(self, format: str) -> str:
        """Return the first half of the instance's tags in `format`."""
        found = self.prefixes.get(format)
        if found is None:
            found = self.prefixes[format] = tag_prefix(
                db=self.prepared.db,
                generation=self.generation,
                epoch=self.analysis.epoch,
                sql=self.analysis.sql,
                names=self.key[1],
                packed=self.key[2],
                format=format,
            )
        return found


def instance_key(query_id: str, args: Mapping[str, Value]) -> InstanceKey:
    """Return a key that is equal only for the same query with identical arguments: 1.0 and 1.00 differ.

    It encodes the arguments: call it in a thread if they are long.
    """
    pairs = sorted(args.items())
    return query_id, tuple(name for name, _ in pairs), pack_args(pairs)


def args_size(args: Mapping[str, Value]) -> int:
    """Return about how many bytes of memory the arguments take, without encoding them."""
    return sum(CELL + _value_size(value) for value in args.values())


def _value_size(value: object) -> int:
    if isinstance(value, tuple):
        return CELL * len(value)
    if isinstance(value, msgspec.Struct):
        return sum(map(_value_size, msgspec.structs.astuple(value)))
    return sys.getsizeof(value)


def named_args(parameters: Sequence[str], args: Args) -> dict[str, Value]:
    """Return `args` by parameter name; InvalidRequest if any are missing or unknown."""
    wanted = dict.fromkeys(parameters)
    if isinstance(args, Mapping):
        given = {name.lstrip(":@$"): value for name, value in args.items()}
        strange = [name for name in given if name not in wanted]
        if strange:
            raise InvalidRequest(f"the query has no parameter {strange[0][:60]!r}", hint=_takes(wanted))
    else:
        if len(args) != len(wanted):
            raise InvalidRequest(f"the query takes {_count(wanted)}, {len(args)} given", hint=_takes(wanted))
        given = dict(zip(wanted, args, strict=True))
    for name in wanted:
        if name not in given:
            raise InvalidRequest(f"argument {name!r} is missing", hint=_takes(wanted))
        if given[name] is UNAVAILABLE:
            raise InvalidRequest("an argument cannot be of tag `unavailable`")
    return given


def _takes(wanted: Collection[str]) -> str:
    if all(name.isdigit() for name in wanted):
        return f"It takes {_count(wanted)}, positional." if wanted else "It takes none."
    return f"It takes {_count(wanted)}: {', '.join(wanted)}."


def _count(wanted: Collection[str]) -> str:
    return "1 argument" if len(wanted) == 1 else f"{len(wanted)} arguments"


class Instances:
    """The most recently requested instances, within limits of number and bytes. Use it in the event loop."""

    def __init__(self, most: int = MAX_INSTANCES, max_bytes: int = MAX_BYTES) -> None:
        self._most, self._max_bytes = most, max_bytes
        self._known: OrderedDict[Hashable, Instance] = OrderedDict()
        self._of_query = Counter[str]()  # number of cached instances by query id
        self.bytes = 0  # of their arguments, and of the text of each query once

    def get(self, key: Hashable) -> Instance | None:
        """Return the cached instance, and count the request in its `asked`; None if it is not cached."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
            found.asked += 1
        return found

    def holds(self, instance: Instance) -> bool:
        """Return whether this very instance is cached, rather than one of another analysis."""
        return self._known.get(instance.key) is instance

    def put(self, instance: Instance) -> list[Hashable]:
        """Cache `instance` unless its arguments are large; return the keys of the instances evicted for it."""
        self._pop(instance.key)
        if instance.size > MAX_ARGS_BYTES:
            return []
        self._known[instance.key] = instance
        self._count(instance, 1)
        evicted: list[Hashable] = []
        while len(self._known) > self._most or (self.bytes > self._max_bytes and len(self._known) > 1):
            evicted.append(oldest := next(iter(self._known)))
            self._pop(oldest)
        return evicted

    def _pop(self, key: Hashable) -> None:
        found = self._known.pop(key, None)
        if found is not None:
            self._count(found, -1)

    def _count(self, instance: Instance, sign: int) -> None:
        """Count an instance that was added, or with `sign` -1 one that was removed."""
        self.bytes += sign * instance.size
        query = instance.prepared
        if self._of_query[query.id] == (0 if sign > 0 else 1):
            self.bytes += sign * TEXT_FACTOR * len(query.sql)
        self._of_query[query.id] += sign
        if not self._of_query[query.id]:
            del self._of_query[query.id]

    def __len__(self) -> int:
        return len(self._known)
