"""Filter: which changes a subscriber sees, and as what.

A row filter looks at both images: in → in is an update, out → in an insert, in → out a delete, out → out
nothing. The op that is delivered tells which images go with it: none that lies outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.feeds.filters.row_filter import Interest, Rule
from headwater.feeds.options import Options
from headwater.model.change import Change, Op
from headwater.model.per_table import PerTable
from headwater.model.table import Key, Row, Table
from headwater.sources.read import Readable

Cut = Callable[[int, Table, Row | None], bool]  # whether the change at an offset is news for the key of an image


class Filter:
    """The filter of `options`. Rules are compiled once per shape of a table. May be asked from any thread."""

    def __init__(self, options: Options, source: Readable) -> None:
        self.options = options
        self._source = source
        self._tables = frozenset(options.tables)
        self._ops = frozenset(Op[word.upper()] for word in options.ops)
        self._all = not (options.looks_at_rows or options.columns)
        self._rule = PerTable(self._compiled)

    def wants(self, table: str) -> bool:
        """Whether changes of `table` may pass."""
        return not self._tables or table in self._tables

    @property
    def tables(self) -> frozenset[str]:
        """The tables named; none means all."""
        return self._tables

    def raw_ops(self) -> frozenset[Op] | None:
        """The ops of the log that may pass where nothing is cut, in whatever guise; None is all."""
        if not self._ops:
            return None
        moved = {Op.INSERT, Op.DELETE} & self._ops if self.options.looks_at_rows else set()
        return self._ops | ({Op.UPDATE} if moved else set())

    def interest(self, table: Table) -> Interest:
        """What a row of `table` must have; raises like `decide`."""
        return Interest() if self._all else self._rule(table).interest

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """How the bytes of an interest are made from values of `columns`."""
        return self._source.order(table, columns)

    def is_cheap(self, table: Table) -> bool:
        """Whether `decide` on changes of `table` may be asked by whoever serves others; raises like it."""
        return self._all or self._rule(table).is_cheap

    def decide(self, changes: Sequence[Change], *, first: int = 0, cut: Cut | None = None) -> list[Op | None]:
        """The op each change is delivered as, None where it is not.

        With `cut`, an image also counts as outside where the change is no news for its key; offsets are
        `first`, `first + 1`, …
        """
        if self._all and cut is None:
            tables = {id(change.table): change.table for change in changes}.values()
            if not self._ops and all(self.wants(table.name) for table in tables):
                return [change.op for change in changes]
            return [self._plain(change) for change in changes]
        inside = self._inside(changes)
        found: list[Op | None] = []
        for place, change in enumerate(changes):
            before, after = inside[place]
            if cut is not None and change.op not in ROW_OPS:
                found.append(self._plain(change) if cut(first + place, change.table, None) else None)
                continue
            if cut is not None:
                before = before and change.before is not None and cut(first + place, change.table, change.before)
                after = after and change.after is not None and cut(first + place, change.table, change.after)
            found.append(self._delivered(change, before, after))
        return found

    def rows(self, table: Table, rows: Sequence[Row]) -> list[Row]:
        """The rows of a snapshot that pass, delivered as inserts."""
        if not self.wants(table.name) or (self._ops and Op.INSERT not in self._ops):
            return []
        if self._all:
            return list(rows)
        rule = self._rule(table)
        if self.options.columns and not rule.has_selected:
            return []
        return [row for row, inside in zip(rows, rule.inside(rows), strict=True) if inside]

    def _plain(self, change: Change) -> Op | None:
        passes = self.wants(change.table.name) and (not self._ops or change.op in self._ops)
        return change.op if passes else None

    def _inside(self, changes: Sequence[Change]) -> list[tuple[bool, bool]]:
        """For each change whether its before and its after image lie inside; each rule is asked once."""
        found = [[False, False] for _ in changes]
        asked: dict[Rule, list[tuple[int, int, Row]]] = {}
        for place, change in enumerate(changes):
            if change.op in ROW_OPS and self.wants(change.table.name):
                for image, row in ((0, change.before), (1, change.after)):
                    if row is not None:
                        asked.setdefault(self._rule(change.table), []).append((place, image, row))
        for rule, images in asked.items():
            answers = rule.inside([row for _, _, row in images])
            for (place, image, _), inside in zip(images, answers, strict=True):
                found[place][image] = inside
        return [(before, after) for before, after in found]

    def _delivered(self, change: Change, before: bool, after: bool) -> Op | None:
        if change.op not in ROW_OPS:
            return self._plain(change)
        op = CASES[before, after]
        if op is None or (self._ops and op not in self._ops):
            return None
        if self.options.columns and not self._columns_pass(change, op):
            return None
        return op

    def _columns_pass(self, change: Change, op: Op) -> bool:
        rule = self._rule(change.table)
        if op is Op.UPDATE and change.before is not None and change.after is not None:
            return rule.differs(change.before, change.after)
        return rule.has_selected

    def _compiled(self, table: Table) -> Rule:
        try:
            return Rule(self.options, table, self._source)
        except HeadwaterError as error:
            if error.retryable:
                raise  # the database is away: it says nothing about the filter
            raise InvalidRequest(
                f"the filter does not fit table {table.name!r} at version {table.version}: {error.message}",
                hint=error.hint or "Close the subscription and subscribe anew with a filter that fits.",
            ) from None


ROW_OPS = frozenset((Op.INSERT, Op.UPDATE, Op.DELETE))
CASES: dict[tuple[bool, bool], Op | None] = {
    (True, True): Op.UPDATE,
    (False, True): Op.INSERT,
    (True, False): Op.DELETE,
    (False, False): None,
}
