"""The view of a query's subscriber: one invalidation per relevant transaction, at its last relevant change."""

from __future__ import annotations

from headwater.errors import Forbidden, HeadwaterError
from headwater.feeds.filters.filter import NewerThanSnapshot
from headwater.feeds.formats.native import Native
from headwater.feeds.formats.values import PLAIN
from headwater.feeds.groups.log_reader import (
    INVALIDATE,
    SCAN,
    Delivery,
    Page,
    View,
    parts_of,
    shape_of,
    signature_of,
)
from headwater.feeds.options import Options, Shape
from headwater.feeds.query_feeds.answer_confirmation import AnswerConfirmation
from headwater.feeds.query_feeds.invalidation import Invalidations, invalidations
from headwater.feeds.query_feeds.query_instances import QueryInstance
from headwater.feeds.query_feeds.relevant_changes import RelevantChanges, relevant, schema_changes, transaction_of
from headwater.log.live.live_log import LiveLog
from headwater.model.change import Change, Op, Transaction
from headwater.sources.read import Readable


class QueryView(View):
    """The view of options that name a query. Pages end between transactions, or before the first relevant change."""

    is_whole = True

    def __init__(
        self,
        options: Options,
        source: Readable,
        instance: QueryInstance,
        made: Invalidations | None = None,
        confirmation: AnswerConfirmation | None = None,
        allowed_tables: frozenset[str] | None = None,
    ) -> None:
        unused = Native(Shape(options.db), PLAIN)  # no change is sent
        super().__init__(options, source, unused, is_restricted=allowed_tables is not None)
        self.instance = instance
        self.allowed_tables = allowed_tables  # the tables that the readers may see; None: all tables
        self.signature = signature_of(options, allowed_tables)
        self.invalidations = invalidations(shape_of(options, allowed_tables is not None)) if made is None else made
        self.confirmation = confirmation
        self.is_slow = confirmation is not None  # it queries the database, for which no other reader may wait

    def set_instance(self, instance: QueryInstance) -> None:
        """Use the newly analysed `instance` from now on."""
        self.instance, self.is_outdated = instance, False

    def check_scope(self) -> None:
        """Raise Forbidden if the query now reads more tables than its readers may see.

        A schema change can cause this: a query whose dependencies become unknown is invalidated by every change.
        """
        if self.allowed_tables is None:
            return
        instance = self.instance
        reads = (*instance.tables, *instance.beyond, *(found.table for found in instance.dependencies))
        if instance.follows_all or not self.allowed_tables.issuperset(reads):
            raise Forbidden(
                "since a schema change the query reads tables that this reader may not see",
                hint="Request scopes on all tables that the query reads, or prepare another query.",
                database=self.options.db,
            )

    def sees(self, change: Change) -> bool:
        """Return whether the readers may see `change`: a change of the schema may be relevant though it is hidden."""
        return self.allowed_tables is None or change.table.name in self.allowed_tables

    def page(
        self,
        log: LiveLog,
        *,
        after: int,
        upto: int | None = None,
        limit: int,
        most: int,
        scan: int = SCAN,
        newer: NewerThanSnapshot | None = None,
    ) -> Page:
        """Return a page of invalidations as View.page does of changes; raise Forbidden as `check_scope` does."""
        self.check_scope()
        return _Pages(self, log, after, limit, most).read(log.latest if upto is None else upto, scan)


class TransactionMatch:
    """The relevant changes of one transaction for one view, and whether any of them passes the filter."""

    def __init__(self, view: QueryView, instance: QueryInstance, transaction: int, *, is_whole: bool) -> None:
        self._view, self._instance = view, instance
        self.transaction = transaction
        self.is_whole = is_whole  # read from the first change of the transaction on
        self.found: RelevantChanges | None = None
        self.passes = False
        self.op: Op | None = None  # the op that the filter delivers the last relevant change as
        self.schema = -1  # the offset of the last schema change in the transaction

    def take(self, part: Transaction) -> None:
        """Add the next part of the transaction."""
        self.schema = max(self.schema, schema_changes(part))
        ones = [one for one in relevant(self._instance, part) if self._view.sees(one.change)]
        if not ones:
            return
        ops = self._view.filter.decide([one.change for one in ones])
        self.passes, self.op = self.passes or any(op is not None for op in ops), ops[-1]
        for one in ones:
            if self.found is None:
                self.found = RelevantChanges(one)
            else:
                self.found.take(one)


class _Pages:
    """Reads one page of invalidations from the log."""

    def __init__(self, view: QueryView, log: LiveLog, after: int, limit: int, most: int) -> None:
        self._view, self._log, self._after, self._limit, self._most = view, log, after, limit, most
        self._instance = view.instance  # the same instance for the whole page
        self._deliveries: list[Delivery] = []
        self._size = 0
        self._upto, self._ts = after, 0

    def read(self, upto: int, scan: int) -> Page:
        try:
            self._read(upto, scan)
        except HeadwaterError:
            if self._upto == self._after:
                raise
            # The invalidations before the error are delivered first; the next page raises.
        return Page(self._deliveries, self._upto, self._ts, self._size)

    def _read(self, upto: int, scan: int) -> None:
        matched: TransactionMatch | None = None
        for part in parts_of(self._log, self._after, upto):
            if matched is None or matched.transaction != transaction_of(part):
                matched = self._match(transaction_of(part), is_whole=part.start == 0)
            matched.take(part)
            if part.last:
                self._end(matched, part)
            elif matched.found is None and part.upto - self._after >= scan:
                self._upto, self._ts = part.upto, 0  # no relevant change so far: the next page may start here
            else:
                continue
            if self._is_done(matched, scan):
                return

    def _match(self, transaction: int, *, is_whole: bool) -> TransactionMatch:
        return TransactionMatch(self._view, self._instance, transaction, is_whole=is_whole)

    def _is_done(self, matched: TransactionMatch, scan: int) -> bool:
        if matched.schema > self._instance.head:
            self._view.is_outdated = True  # the query must be analysed again before later changes are read
            return True
        is_full = len(self._deliveries) >= self._limit or self._size >= self._most
        return is_full or self._upto - self._after >= scan

    def _end(self, matched: TransactionMatch, part: Transaction) -> None:
        """Deliver the invalidation of a transaction that ended."""
        if matched.found is not None and not matched.is_whole:
            matched = self._again(matched.transaction, part.upto)
        found = matched.found
        if found is not None and matched.passes and not self._is_needless(found):
            data = self._view.invalidations.write(self._instance, found, matched.op)
            self._deliveries.append(Delivery(found.last.offset, INVALIDATE, data))
            self._size += len(data)
        self._upto, self._ts = part.upto, part.ts

    def _again(self, transaction: int, upto: int) -> TransactionMatch:
        """Read the whole transaction again, because the reader started inside it and all its changes count."""
        matched = self._match(transaction, is_whole=True)
        for part in self._log.scan(after=max(transaction, self._log.horizon) - 1, upto=upto):
            matched.take(part)
        return matched

    def _is_needless(self, found: RelevantChanges) -> bool:
        confirmation, last = self._view.confirmation, found.last.offset
        return confirmation is not None and confirmation.is_needless(self._instance, self._log, found.transaction, last)
