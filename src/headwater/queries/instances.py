"""Instances: a prepared query with its arguments, ready to be asked and to be matched. Pure but for a cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

from headwater.errors import InvalidRequest
from headwater.model.dependency import Analysis
from headwater.model.literal import UNAVAILABLE, Value
from headwater.model.pack import encode_row
from headwater.model.table import Table
from headwater.queries.binding import Bound
from headwater.queries.prepared import Prepared
from headwater.queries.tags import Question, sorted_args

MAX_INSTANCES = 20_000  # that are remembered between two requests

Args = Sequence[Value] | Mapping[str, Value]


class Instance:
    """One query with its arguments, as it is understood in one state of the schema and one history."""

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
        "tables",
        "unguarded",
    )

    def __init__(
        self,
        prepared: Prepared,
        analysis: Analysis,
        args: dict[str, Value],
        bound: Bound,
        *,
        tables: Mapping[str, Table],
        generation: str,
        schema: int,
    ) -> None:
        self.prepared, self.analysis, self.args, self.bound = prepared, analysis, args, bound
        # As they were when it was bound; only guards ask for them again.
        self.tables = {name: tables[name] for name in analysis.tables if name in tables} if analysis.guards else {}
        self.generation = generation  # of the log
        self.schema = schema  # the newest state of the schema in which the analysis is known to hold
        self.key = instance_key(prepared.id, args)
        self.prefixes: dict[tuple[str, str], str] = {}
        self.asked = 0  # times, while it was remembered
        self.returned = False  # somebody came back with a tag
        self.unguarded = 0  # answers in a row that were to bring guards, and did not
        self.digest: tuple[int, bytes] | None = None  # of the last answer, where answers are compared: and its position

    def prefix(self, format: str, scope: str = "") -> str:
        """The first half of its tags in `format`."""
        found = self.prefixes.get((format, scope))
        if found is None:
            asked = Question(
                db=self.prepared.db,
                generation=self.generation,
                epoch=self.analysis.epoch,
                sql=self.analysis.sql,
                args=sorted_args(self.args),
                format=format,
                scope=scope,
            )
            found = self.prefixes[format, scope] = asked.prefix
        return found


def instance_key(query_id: str, args: Mapping[str, Value]) -> Hashable:
    """Equal exactly for the same query with the same typed arguments."""
    pairs = sorted_args(args)
    return query_id, tuple(name for name, _ in pairs), encode_row(tuple(value for _, value in pairs))


def named_args(parameters: Sequence[str], args: Args) -> dict[str, Value]:
    """`args` by the names of the parameters; InvalidRequest when some are missing or too many."""
    wanted = list(dict.fromkeys(parameters))
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


def _takes(wanted: Sequence[str]) -> str:
    if all(name.isdigit() for name in wanted):
        return f"It takes {_count(wanted)}, positional." if wanted else "It takes none."
    return f"It takes {_count(wanted)}: {', '.join(wanted)}."


def _count(wanted: Sequence[str]) -> str:
    return "1 argument" if len(wanted) == 1 else f"{len(wanted)} arguments"


class Instances:
    """The instances asked for lately. In the loop."""

    def __init__(self, most: int = MAX_INSTANCES) -> None:
        self._most = most
        self._known: OrderedDict[Hashable, Instance] = OrderedDict()

    def get(self, key: Hashable) -> Instance | None:
        """The instance, if it is remembered."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
            found.asked += 1
        return found

    def holds(self, instance: Instance) -> bool:
        """Whether it is remembered, and not in another understanding."""
        return self._known.get(instance.key) is instance

    def put(self, instance: Instance) -> Hashable | None:
        """Remember it; the key of the one that was forgotten for it."""
        self._known[instance.key] = instance
        self._known.move_to_end(instance.key)
        return self._known.popitem(last=False)[0] if len(self._known) > self._most else None

    def __len__(self) -> int:
        return len(self._known)
