"""Analyses of the statements on a database, and their answers while the schema is unchanged."""

from __future__ import annotations

import hashlib
import sys

import msgspec

from headwater.errors import Busy, Forbidden, HeadwaterError, InvalidRequest
from headwater.model.bounded_cache import BoundedCache
from headwater.model.dependencies.dependency import Analysis
from headwater.model.literal import Value
from headwater.model.principal import OWNER
from headwater.model.work.answer_limits import MAX_ROWS
from headwater.sources.postgres.capture.log_positions import Positions
from headwater.sources.postgres.errors import state_of
from headwater.sources.postgres.protocol_session import Link, Pool, own_values
from headwater.sources.postgres.query.analysis.dependencies import dependencies, differs_only_in_order, in_order
from headwater.sources.postgres.query.analysis.parameters import (
    NumberedStatement,
    bound_args,
    marked,
    may_depend_on_clock,
)
from headwater.sources.postgres.query.analysis.parse_tree import UnsupportedTree
from headwater.sources.postgres.query.analysis.parse_tree_source import PARSED, Body, StatementFacts, body_of, facts_of
from headwater.sources.postgres.query.analysis.result_order import NO_ORDER, CatalogFacts, judge, row_key
from headwater.sources.postgres.query.analysis.row_conditions import Conditions
from headwater.sources.postgres.query.analysis.schema_epoch import State, epoch_of, number_in, state_in
from headwater.sources.postgres.query.analysis.statement_growth import check_text
from headwater.sources.postgres.query.analysis.uncacheable_objects import (
    beyond,
    known_to,
    operators,
    read_relations,
    unseen,
    volatility,
)
from headwater.sources.postgres.query.analysis.volatile_calls import calls_of_failed, volatile_calls
from headwater.sources.postgres.query.analysis.volatile_calls import refuse as refuse_calls
from headwater.sources.postgres.query.statement_rules import check_allowed, check_length, check_ours, places_named
from headwater.sources.postgres.schema.relations import table_name
from headwater.sources.postgres.schema.table_shapes import OURS
from headwater.sources.postgres.snapshot_visibility import VisibleOffset
from headwater.sources.query import ReadResult

MAX_KNOWN = 10_000  # statements whose analysis is cached
MAX_KNOWN_BYTES = 64 << 20  # their memory, approximately
TEXT_FACTOR = 4  # an analysis takes several times the memory of the statement's text
NAME = 64  # bytes per name in an analysis
TRIES = 5  # attempts while the schema keeps changing
_NO_TYPE = "42P18"
_READS = frozenset({"select", "values", "table", "with"})
_LOCKED = f"""
SELECT DISTINCT l.relation, n.nspname, c.relname, starts_with(c.relname, '{OURS}') OR starts_with(n.nspname, '{OURS}')
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND l.relation >= 16384 AND c.relkind NOT IN ('i', 'I', 't')
"""


class _CachedAnalysis(msgspec.Struct, frozen=True):
    """The analysis of a statement in one state of the schema."""

    state: State
    types: tuple[int, ...]
    analysis: Analysis
    relations: frozenset[int] | None  # all that it may read; None: anything


_Key = tuple[str, tuple[str, ...]]


def _key(analysis: Analysis) -> _Key:
    """Return the cache key of a statement: PostgreSQL's text is equal for different parameter names."""
    return analysis.sql, analysis.parameters


def _size(known: _CachedAnalysis) -> int:
    """Return the approximate memory of an analysis, in bytes."""
    analysis = known.analysis
    names = len(analysis.columns) + len(analysis.objects) + len(known.relations or ())
    names += sum([1 + len(each.columns or ()) for each in analysis.dependencies])
    return TEXT_FACTOR * sys.getsizeof(analysis.sql) + NAME * names


class Analyses:
    """The analyses and answers of a source. Thread-safe."""

    def __init__(self, pool: Pool, visibility: Positions, publication: str, *, statement_seconds: float = 30.0) -> None:
        self._pool, self._visibility, self._publication = pool, visibility, publication
        self._seconds = statement_seconds
        self._known: BoundedCache[_Key, _CachedAnalysis] = BoundedCache(MAX_KNOWN, MAX_KNOWN_BYTES)

    # --- analysis ----------------------------------------------------------------------------------------------

    def analyse(self, sql: str) -> Analysis:
        """Return the dependencies of one read-only statement; see Queryable."""
        check_length(sql)
        check_text(sql)
        if check_allowed(sql) not in _READS:
            raise InvalidRequest("only a SELECT can be a query", hint="Send one SELECT.")
        with places_named(sql):
            found = self._understand(marked(sql))
        refuse_calls(found.analysis.calls, OWNER)
        self._remember(found)
        return found.analysis

    def _remember(self, found: _CachedAnalysis) -> None:
        self._known.put(_key(found.analysis), found, _size(found))

    def _understand(self, statement: NumberedStatement) -> _CachedAnalysis:
        """Return the analysis of a statement, in a state of the schema that was still current afterwards."""
        for _ in range(TRIES):
            found = self._pool.probe(lambda link: self._looked_at(link, statement), self._seconds)
            if self._pool.read(number_in, self._seconds) == found.state.number:
                return found
        raise _moving()

    def _looked_at(self, link: Link, statement: NumberedStatement) -> _CachedAnalysis:
        state = state_in(link)
        types, columns = _described(link, statement)
        touched: frozenset[int] | None = None
        body: Body | None = None
        try:
            body = body_of(link, statement.sql, types)
            statement, facts, known = _ordered(link, statement, types, body)
            analysis = self._analysed(link, statement, columns, facts, known)
            if analysis.is_cacheable or not (analysis.beyond or _is_secured(facts)):
                touched = frozenset(each.oid for each in read_relations(facts))
        except (UnsupportedTree, Forbidden, RecursionError) as error:
            analysis = _unknown(statement, columns, error, calls_of_failed(link, body))
        digest = hashlib.blake2b(f"{analysis.epoch}/{state.session}/{types}".encode(), digest_size=12)
        analysis = msgspec.structs.replace(analysis, epoch=digest.hexdigest())
        return _CachedAnalysis(state, types, analysis, touched)

    def _analysed(
        self,
        link: Link,
        statement: NumberedStatement,
        columns: tuple[str, ...],
        facts: StatementFacts,
        known: CatalogFacts,
    ) -> Analysis:
        hidden, judged = unseen(link, facts, self._publication), judge([facts.query, *facts.views], known)
        volatile = {*volatility(link, facts), *hidden, *judged.reasons}
        if facts.used.has_moment and may_depend_on_clock(statement.sql):
            volatile.add("a date or a time in it may depend on the clock")
        relations, is_total = read_relations(facts), not judged.doubts
        conditions = Conditions(facts, statement.names, operators(link, facts), set(known.odd))
        return Analysis(
            sql=statement.sql,
            parameters=statement.names,
            columns=columns,
            tables=tuple(sorted({each.called for each in relations if each.kind not in "vp"})),
            objects=tuple(sorted({each.called for each in relations})),
            beyond=tuple(sorted({*beyond(link, facts), *_locked_besides(link, facts)})),
            calls=volatile_calls(link, facts.query),
            dependencies=dependencies(facts, conditions, is_total=is_total),
            epoch=epoch_of(link, facts),
            volatile=tuple(sorted(volatile)),
            unseen=hidden,
            doubts=judged.doubts,
            is_total=is_total,
            key=row_key(facts.query, known),
        )

    # --- answers -----------------------------------------------------------------------------------------------

    def answer(self, analysis: Analysis, args: dict[str, Value]) -> ReadResult | None:
        """Run `analysis.sql` with its parameters by name; None if its epoch has changed, Busy if it keeps changing."""
        known = self._known.get(_key(analysis))
        for _ in range(TRIES):
            if known is None:
                known = self._meaning(analysis)
            if known is None or known.analysis.epoch != analysis.epoch:
                return None
            found = self._answered(known, args)
            if found is not None:
                return found
            self._pool.renew()  # a session may be older than the settings of the database or the role
            known = None
        raise _moving()

    def _meaning(self, analysis: Analysis) -> _CachedAnalysis | None:
        """Return the current analysis of the statement; None if the statement is no longer valid."""
        try:
            found = self._understand(NumberedStatement(analysis.sql, analysis.parameters))
        except InvalidRequest:
            return None
        self._remember(found)
        return found

    def _answered(self, known: _CachedAnalysis, args: dict[str, Value]) -> ReadResult | None:
        """Return the answer, if it was read in the state of the schema that is `known`; None otherwise.

        A transaction sees rows as of its snapshot, but PostgreSQL resolves names at the time of the statement. So the
        answer is checked against the schema of the snapshot, against the locks, and against the schema afterwards.
        """
        bound = bound_args(known.analysis.parameters, known.types, args)
        for _ in range(TRIES):
            with self._visibility.reading():
                found = self._pool.read(lambda link: _read(link, known, bound), self._seconds)
                if found is None:
                    return None
                read, snapshot = found
                has_tag = known.analysis.is_cacheable and read.settled
                place = self._visibility.place(snapshot) if has_tag else VisibleOffset(self._visibility.seen(snapshot))
            number = self._pool.read(number_in, self._seconds) if place.schema is None else place.schema
            if number != known.state.number:
                return None
            if place.is_exact or place.is_behind:
                break  # otherwise it was read between two commits that the log has in the other order
        # A tag identifies one answer: an answer that may include more than its offset has no tag.
        return msgspec.structs.replace(read, offset=place.offset, settled=place.is_exact)


def _read(link: Link, known: _CachedAnalysis, bound: list[bytes | None]) -> tuple[ReadResult, str] | None:
    state = state_in(link)
    if (state.number, state.session) != (known.state.number, known.state.session):
        return None
    with own_values(known.relations is not None):  # None: tables with policies, or functions that may read anything
        answer = link.run(known.analysis.sql, bound, known.types, max_rows=MAX_ROWS, to_end=False)
    # A truncated answer has ended the transaction, and its further reads are unknown: it has no tag.
    read = ReadResult(answer.columns, answer.answer_rows(), 0, answer.truncated, settled=not answer.truncated)
    if not answer.truncated:
        touched = link.again(_LOCKED).values()
        if any(is_ours for *_, is_ours in touched):
            check_ours(link)
        if known.relations is not None and {oid for oid, *_ in touched} - known.relations:
            return None
    return read, state.snapshot


def _locked_besides(link: Link, facts: StatementFacts) -> set[str]:
    """Return the relations that PostgreSQL locked when it parsed the statement, and that its tree does not show.

    A second barrier for scoped callers, before anything runs: it detects a tree reader that skips a part of the tree.
    """
    if _is_secured(facts):  # policies may read other tables
        return set()
    read = {each.oid for each in read_relations(facts)}
    locked = link.again(_LOCKED).values()
    return {table_name(schema, name) for oid, schema, name, _ in locked if oid not in read}


def _is_secured(facts: StatementFacts) -> bool:
    return any(each.is_secured for each in read_relations(facts))


def _ordered(
    link: Link, statement: NumberedStatement, types: tuple[int, ...], body: Body
) -> tuple[NumberedStatement, StatementFacts, CatalogFacts]:
    """Return the statement, with keys added to its ORDER BY if that makes its order total, and its facts."""
    facts = facts_of(link, body)
    known = known_to(link, facts, operators(link, facts))
    if judge([facts.query], known).doubts == (NO_ORDER,):
        columns = {oid: each.columns for oid, each in facts.relations.items()}
        text = in_order(statement.sql, facts.query, columns, known)
        if text is not None:
            link.script(f"SAVEPOINT headwater_order; DROP FUNCTION pg_temp.{PARSED}")
            try:
                again = facts_of(link, body_of(link, text, types))
                if differs_only_in_order(facts, again) and not judge([again.query], known).doubts:
                    return msgspec.structs.replace(statement, sql=text), again, known
            except (UnsupportedTree, HeadwaterError):
                link.script("ROLLBACK TO headwater_order")
    return statement, facts, known


def _described(link: Link, statement: NumberedStatement) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the types of the statement's parameters, and the names of its columns."""
    try:
        types, columns = link.describe(statement.sql)
    except InvalidRequest as error:
        if state_of(error) == _NO_TYPE:
            raise InvalidRequest(error.message, hint="Cast the parameter to its type: $1::integer.") from None
        raise
    if len(types) != len(statement.names):
        problem = f"PostgreSQL finds {len(types)} parameters in the statement, not {len(statement.names)}"
        raise InvalidRequest(problem, hint="Write them $1, $2 … or :name.")
    if not columns:
        raise InvalidRequest("the statement returns no columns", hint="Send a SELECT that has columns.")
    return types, columns


def _unknown(
    statement: NumberedStatement, columns: tuple[str, ...], error: Exception, calls: tuple[str, ...]
) -> Analysis:
    """Return the analysis of a statement that could not be analysed: its answers must not be cached."""
    if isinstance(error, Forbidden):
        reason = (
            f"its dependencies cannot be determined ({error.message}): GRANT TEMPORARY ON DATABASE to the server's role"
        )
    else:
        reason = f"the statement was not understood ({error or type(error).__name__})"
    return Analysis(
        sql=statement.sql,
        parameters=statement.names,
        columns=columns,
        tables=(),
        objects=(),
        beyond=(reason,),
        calls=calls,
        dependencies=(),
        epoch="unknown",
        volatile=(reason,),
        unseen=(reason,),
    )


def _moving() -> Busy:
    return Busy("the schema is being changed", hint="Try again in a moment.")
