"""What a subscriber of a query sees: invalidations, one for each transaction that matters, at its last such change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headwater.errors import Forbidden, HeadwaterError
from headwater.feeds.filters.filter import Cut
from headwater.feeds.formats.native import plain
from headwater.feeds.groups.log_reader import INVALIDATE, SCAN, Delivery, Page, View, parts_of, signature_of
from headwater.feeds.options import Options, Shape
from headwater.feeds.query_feeds.answer_confirmation import Confirming
from headwater.feeds.query_feeds.invalidation import Invalidations, invalidations
from headwater.feeds.query_feeds.query_instances import Question
from headwater.feeds.query_feeds.relevant_changes import Gathering, relevant, schema_changes, transaction_of
from headwater.log.live.live_log import LiveLog
from headwater.model.change import Op, Transaction
from headwater.sources.read import Readable


class QueryView(View):
    """The view of options that name a query. Pages end where transactions do, or where nothing of one mattered yet."""

    is_whole = True

    def __init__(
        self,
        options: Options,
        source: Readable,
        question: Question,
        made: Invalidations | None = None,
        confirming: Confirming | None = None,
        held: frozenset[str] | None = None,
    ) -> None:
        super().__init__(options, source, plain(Shape(options.db)))  # no change is ever written as itself
        self.question = question
        self.held = held  # the tables that its readers are held to; None: they may see all of them
        self.signature = signature_of(options, held)
        self.invalidations = invalidations(options.shape) if made is None else made
        self.confirming = confirming
        self.is_slow = confirming is not None  # it asks the database: never where others wait

    def understood(self, question: Question) -> None:
        """From here on as `question` says."""
        self.question, self.is_outdated = question, False

    def check_scope(self) -> None:
        """Raise Forbidden if the query has come to read more than its readers may see.

        A change of the schema does that: a query that cannot be kept any more is sent every change there is.
        """
        if self.held is None:
            return
        question = self.question
        reads = (*question.tables, *question.beyond, *(found.table for found in question.dependencies))
        if question.follows_all or not self.held.issuperset(reads):
            raise Forbidden(
                "the query reads more than the tables of this reader since the schema changed",
                hint="Ask for scopes on all that it reads, or prepare another query.",
                database=self.options.db,
            )

    def page(
        self,
        log: LiveLog,
        *,
        after: int,
        upto: int | None = None,
        limit: int,
        most: int,
        scan: int = SCAN,
        cut: Cut | None = None,
    ) -> Page:
        """See `read_page`."""
        self.check_scope()
        return _Pages(self, log, after, limit, most).read(log.latest if upto is None else upto, scan)


class Weighed:
    """One transaction for one view: what of it matters, and whether any of that passes the filter."""

    def __init__(self, view: QueryView, question: Question, transaction: int, *, is_whole: bool) -> None:
        self._view, self._question = view, question
        self.transaction = transaction
        self.is_whole = is_whole  # it was seen from its first change on
        self.found: Gathering | None = None
        self.passes = False
        self.op: Op | None = None  # what the filter makes of the last one
        self.schema = -1  # the last change of the schema in it

    def take(self, part: Transaction) -> None:
        """The next part of the transaction."""
        self.schema = max(self.schema, schema_changes(part))
        ones = list(relevant(self._question, part))
        if not ones:
            return
        ops = self._view.filter.decide([one.change for one in ones])
        self.passes, self.op = self.passes or any(op is not None for op in ops), ops[-1]
        for one in ones:
            if self.found is None:
                self.found = Gathering(one)
            else:
                self.found.take(one)


class _Pages:
    """Reads one page."""

    def __init__(self, view: QueryView, log: LiveLog, after: int, limit: int, most: int) -> None:
        self._view, self._log, self._after, self._limit, self._most = view, log, after, limit, most
        self._question = view.question  # for the whole page
        self._deliveries: list[Delivery] = []
        self._size = 0
        self._upto, self._ts = after, 0

    def read(self, upto: int, scan: int) -> Page:
        try:
            self._read(upto, scan)
        except HeadwaterError:
            if self._upto == self._after:
                raise
            # What comes before goes out first; the next page raises.
        return Page(self._deliveries, self._upto, self._ts, self._size)

    def _read(self, upto: int, scan: int) -> None:
        weighed: Weighed | None = None
        for part in parts_of(self._log, self._after, upto):
            if weighed is None or weighed.transaction != transaction_of(part):
                weighed = self._weighed(transaction_of(part), is_whole=part.start == 0)
            weighed.take(part)
            if part.last:
                self._end(weighed, part)
            elif weighed.found is None and part.upto - self._after >= scan:
                self._upto, self._ts = part.upto, 0  # nothing of it mattered so far: whoever goes on can go on here
            else:
                continue
            if self._is_done(weighed, scan):
                return

    def _weighed(self, transaction: int, *, is_whole: bool) -> Weighed:
        return Weighed(self._view, self._question, transaction, is_whole=is_whole)

    def _is_done(self, weighed: Weighed, scan: int) -> bool:
        if weighed.schema > self._question.head:
            self._view.is_outdated = True  # what comes next may mean something else
            return True
        is_full = len(self._deliveries) >= self._limit or self._size >= self._most
        return is_full or self._upto - self._after >= scan

    def _end(self, weighed: Weighed, part: Transaction) -> None:
        """A transaction is over."""
        if weighed.found is not None and not weighed.is_whole:
            weighed = self._again(weighed.transaction, part.upto)
        found = weighed.found
        if found is not None and weighed.passes and not self._is_needless(found):
            data = self._view.invalidations.write(self._question, found, weighed.op)
            self._deliveries.append(Delivery(found.last.offset, INVALIDATE, data))
            self._size += len(data)
        self._upto, self._ts = part.upto, part.ts

    def _again(self, transaction: int, upto: int) -> Weighed:
        """From its first change on, where the reader stood in its midst: all of it counts."""
        weighed = self._weighed(transaction, is_whole=True)
        for part in self._from(transaction, upto):
            weighed.take(part)
        return weighed

    def _from(self, transaction: int, upto: int) -> Iterable[Transaction]:
        found: Iterator[Transaction] = self._log.scan(after=max(transaction, self._log.horizon) - 1, upto=upto)
        return found

    def _is_needless(self, found: Gathering) -> bool:
        confirming, last = self._view.confirming, found.last.offset
        return confirming is not None and confirming.is_needless(self._question, self._log, found.transaction, last)
