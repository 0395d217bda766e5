"""Confirming: whether an answer is the same after a change that might have changed it. It may only hold back."""

from __future__ import annotations

import threading
from collections import OrderedDict

from headwater.errors import OffsetExpired
from headwater.feeds.query_feeds.query_instances import Answered, Question
from headwater.feeds.query_feeds.relevant_changes import relevant, transaction_of
from headwater.log.live.live_log import LiveLog

KEPT = 1024  # invalidations that were found to be needless
MOST_SCAN = 10_000  # changes looked through for one of them
WAIT_SECONDS = 0.25  # for what was committed before the answer was read


class Confirming:
    """Of one instance, for all who read it. From any thread; one asks at a time, and the others profit.

    An invalidation is needless only where the answers read before and after it are equal and it is the only one
    between them: then nobody, whenever they asked, can hold another answer. Nothing is known after a restart.
    Where the question itself knows that its answer is the same, it need not be read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefix = ""  # of the question that was asked
        self._known: Answered | None = None
        self._needless: OrderedDict[int, None] = OrderedDict()  # offsets

    def prime(self, question: Question) -> None:
        """Learn the answer, so that already the next invalidation can be confirmed."""
        with self._lock:
            self._turn_to(question)
            if self._known is None:
                self._known = question.answer()

    def is_needless(self, question: Question, log: LiveLog, first: int, offset: int) -> bool:
        """Whether the invalidation of `question` at `offset` says nothing new to anybody. Its transaction is that
        which begins at `first`."""
        with self._lock:
            self._turn_to(question)
            if offset in self._needless:
                return True
            if self._is_steady(question, first, offset):
                self._note(offset)
                return True
            known = self._known
            if known is not None and offset <= known.offset:
                return False  # the answer before it is not known any more
            found = self._known = question.answer()
            if known is None or found is None or found.digest != known.digest:
                return False
            if not _is_alone(question, log, known.offset, found.offset, offset):
                return False
            self._note(offset)
            return True

    def _is_steady(self, question: Question, first: int, offset: int) -> bool:
        steady = question.steady(offset) if question.is_guarded else None
        if steady is None or steady >= first:
            return False
        if self._known is not None and steady <= self._known.offset < offset:
            self._known = Answered(offset, self._known.digest)  # it is the answer here, too
        return True

    def _note(self, offset: int) -> None:
        self._needless[offset] = None
        if len(self._needless) > KEPT:
            self._needless.popitem(last=False)

    def _turn_to(self, question: Question) -> None:
        if self._prefix != question.prefix:
            self._prefix, self._known = question.prefix, None
            self._needless.clear()


def _is_alone(question: Question, log: LiveLog, after: int, upto: int, offset: int) -> bool:
    """Whether what lies at `offset` belongs to the only transaction in (after, upto] that matters."""
    if not after < offset <= upto or upto - after > MOST_SCAN:
        return False
    if log.latest < upto and not log.wait_beyond(upto - 1, WAIT_SECONDS):
        return False
    try:
        parts = log.scan(after=after, upto=upto)
        found = {transaction_of(part) for part in parts for _ in relevant(question, part)}
    except OffsetExpired:
        return False
    return len(found) == 1
