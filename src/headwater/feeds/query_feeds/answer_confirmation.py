"""Suppression of invalidations after which the query result is found to be unchanged."""

from __future__ import annotations

import threading
from collections import OrderedDict

from headwater.errors import OffsetExpired
from headwater.feeds.query_feeds.query_instances import QueryInstance
from headwater.feeds.query_feeds.relevant_changes import relevant, transaction_of
from headwater.log.live.live_log import LiveLog
from headwater.model.query.query import AnswerHash

KEPT = 1024  # offsets of needless invalidations that are remembered
MOST_SCAN = 10_000  # changes scanned to confirm one invalidation
WAIT_SECONDS = 0.25  # wait for the log to receive the changes committed before the result was read


class AnswerConfirmation:
    """Finds needless invalidations of one instance for all its readers. Thread-safe; one thread runs the query.

    An invalidation is needless only if the results read before and after it are equal and no other invalidation is
    between them: then no client can have another result. Nothing is known after a restart. Where the instance itself
    knows that its result is unchanged, the query does not run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefix = ""  # the ETag prefix of the instance that `_known` and `_needless` belong to
        self._known: AnswerHash | None = None
        self._needless: OrderedDict[int, None] = OrderedDict()  # offsets

    def prime(self, instance: QueryInstance) -> None:
        """Read the result once, so that the next invalidation can be confirmed."""
        with self._lock:
            self._turn_to(instance)
            if self._known is None:
                self._known = instance.answer()

    def is_needless(self, instance: QueryInstance, log: LiveLog, first: int, offset: int) -> bool:
        """Return whether the result of `instance` is the same before and after the transaction that begins at `first`
        and whose invalidation is at `offset`."""
        with self._lock:
            self._turn_to(instance)
            if offset in self._needless:
                return True
            if self._is_steady(instance, first, offset):
                self._note(offset)
                return True
            known = self._known
            if known is not None and offset <= known.offset:
                return False  # the result before this invalidation is no longer known
            found = self._known = instance.answer()
            if known is None or found is None or found.digest != known.digest:
                return False
            if not _is_alone(instance, log, known.offset, found.offset, offset):
                return False
            self._note(offset)
            return True

    def _is_steady(self, instance: QueryInstance, first: int, offset: int) -> bool:
        steady = instance.steady(offset) if instance.is_guarded else None
        if steady is None or steady >= first:
            return False
        if self._known is not None and steady <= self._known.offset < offset:
            self._known = AnswerHash(offset, self._known.digest)  # the result is the same at `offset`
        return True

    def _note(self, offset: int) -> None:
        self._needless[offset] = None
        if len(self._needless) > KEPT:
            self._needless.popitem(last=False)

    def _turn_to(self, instance: QueryInstance) -> None:
        if self._prefix != instance.prefix:
            self._prefix, self._known = instance.prefix, None
            self._needless.clear()


def _is_alone(instance: QueryInstance, log: LiveLog, after: int, upto: int, offset: int) -> bool:
    """Return whether the change at `offset` belongs to the only relevant transaction in (after, upto]."""
    if not after < offset <= upto or upto - after > MOST_SCAN:
        return False
    if log.latest < upto and not log.wait_beyond(upto - 1, WAIT_SECONDS):
        return False
    try:
        parts = log.scan(after=after, upto=upto)
        found = {transaction_of(part) for part in parts for _ in relevant(instance, part)}
    except OffsetExpired:
        return False
    return len(found) == 1
