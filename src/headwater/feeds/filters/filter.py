"""The filter of a subscription: which changes it delivers, and as which op.

A row filter tests both images of an update: inside → inside is delivered as an update, outside → inside as an insert,
inside → outside as a delete, outside → outside not at all. The delivered op determines the images that are sent: none
that is outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.errors import Forbidden, HeadwaterError, InvalidRequest
from headwater.feeds.filters.row_filter import Interest, Rule
from headwater.feeds.options import Options
from headwater.model.change import Change, Op
from headwater.model.per_table import PerTable
from headwater.model.table import Key, Row, Table
from headwater.sources.read import Readable, permitted_filter

# Returns whether the change at an offset is newer than the snapshot row with the key of an image.
NewerThanSnapshot = Callable[[int, Table, Row | None], bool]


class Filter:
    """The filter of `options`. Rules are compiled once per version of a table. Thread-safe.

    `is_restricted`: its readers are restricted to tables, so a rule that calls user-defined functions is refused, at
    whichever version of a table. Methods that compile a rule raise Forbidden or InvalidRequest if it is refused.
    """

    def __init__(self, options: Options, source: Readable, *, is_restricted: bool = False) -> None:
        self.options, self._is_restricted = options, is_restricted
        self._source = source
        self.tables = frozenset(options.tables)  # empty: all tables
        self._ops = frozenset(Op[word.upper()] for word in options.ops)
        self._all = not (options.looks_at_rows or options.columns)
        self._rule = PerTable(self._compiled)

    def wants(self, table: str) -> bool:
        """Return whether changes of `table` may pass."""
        return not self.tables or table in self.tables

    def raw_ops(self) -> frozenset[Op] | None:
        """Return the logged ops whose changes may pass, as whatever op, if `decide` has no `newer`; None: all ops."""
        if not self._ops:
            return None
        moved = {Op.INSERT, Op.DELETE} & self._ops if self.options.looks_at_rows else set()
        return self._ops | ({Op.UPDATE} if moved else set())

    def interest(self, table: Table) -> Interest:
        """Return the conditions that a row of `table` must meet, for the router; raises as `decide` does."""
        return Interest() if self._all else self._rule(table).interest

    def order(self, table: Table, columns: Sequence[str]) -> Callable[[Key], bytes]:
        """Return the function that encodes values of `columns` as the bytes that an Interest holds."""
        return self._source.order(table, columns)

    def is_cheap(self, table: Table) -> bool:
        """Return whether `decide` on changes of `table` is fast enough for the event loop; raises as `decide` does."""
        return self._all or self._rule(table).is_cheap

    def decide(
        self, changes: Sequence[Change], *, first: int = 0, newer: NewerThanSnapshot | None = None
    ) -> list[Op | None]:
        """Return the op that each change is delivered as, None for a change that is not delivered.

        With `newer`, an image also counts as outside if the snapshot row with its key is newer than the change. The
        offsets of the changes are `first`, `first + 1`, …
        """
        if self._all and newer is None:
            tables = {id(change.table): change.table for change in changes}.values()
            if not self._ops and all(self.wants(table.name) for table in tables):
                return [change.op for change in changes]
            return [self._plain(change) for change in changes]
        inside = self._inside(changes)
        found: list[Op | None] = []
        for place, change in enumerate(changes):
            before, after = inside[place]
            if newer is not None and change.op not in ROW_OPS:
                found.append(self._plain(change) if newer(first + place, change.table, None) else None)
                continue
            if newer is not None:
                before = before and change.before is not None and newer(first + place, change.table, change.before)
                after = after and change.after is not None and newer(first + place, change.table, change.after)
            found.append(self._delivered(change, before, after))
        return found

    def rows(self, table: Table, rows: Sequence[Row]) -> list[Row]:
        """Return the snapshot rows that pass the filter as inserts."""
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
        """Return for each change whether its before and after images are inside; evaluate each rule once."""
        found = [[False, False] for _ in changes]
        images_by_rule: dict[Rule, list[tuple[int, int, Row]]] = {}
        for place, change in enumerate(changes):
            if change.op in ROW_OPS and self.wants(change.table.name):
                for image, row in ((0, change.before), (1, change.after)):
                    if row is not None:
                        images_by_rule.setdefault(self._rule(change.table), []).append((place, image, row))
        for rule, images in images_by_rule.items():
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
            return permitted_filter(lambda: Rule(self.options, table, self._source), is_restricted=self._is_restricted)
        except Forbidden:
            raise
        except HeadwaterError as error:
            if error.retryable:
                raise  # the database is unavailable, which says nothing about the filter
            raise InvalidRequest(
                f"the filter does not fit table {table.name!r} at version {table.version}: {error.message}",
                hint=error.hint or "Close the subscription and subscribe again with a filter that fits the table.",
            ) from None


ROW_OPS = frozenset((Op.INSERT, Op.UPDATE, Op.DELETE))
CASES: dict[tuple[bool, bool], Op | None] = {
    (True, True): Op.UPDATE,
    (False, True): Op.INSERT,
    (True, False): Op.DELETE,
    (False, False): None,
}
