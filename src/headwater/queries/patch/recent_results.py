"""Cache of recent answers by tag, from which later answers are sent as patches."""

from __future__ import annotations

import threading
from collections import OrderedDict

from headwater.queries.etag.row_etag import opaque
from headwater.queries.patch.patch import Answer

PER_INSTANCE = 4
MAX_BYTES = 64 * 2**20


class Results:
    """Answers by instance and tag, within a limit of bytes; the least recently used are evicted first.

    Thread-safe. If two answers with different contents have the same tag, no patch is made from either.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, per_instance: int = PER_INSTANCE) -> None:
        self._max_bytes, self._per_instance = max_bytes, per_instance
        self._kept: OrderedDict[tuple[str, str], Answer | None] = OrderedDict()
        self._tags: dict[str, list[str]] = {}  # oldest first
        self.bytes = 0  # of all cached answers
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, instance: str, answer: Answer) -> None:
        """Cache `answer` under its tag."""
        tag = opaque(answer.tag)
        with self._lock:
            if (instance, tag) in self._kept:
                self._seen_again(instance, tag, answer)
            elif answer.size <= self._max_bytes:
                self._kept[instance, tag] = answer
                self._tags.setdefault(instance, []).append(tag)
                self.bytes += answer.size
                self._shrink(instance)

    def find(self, instance: str, tag: str, content_hash: str | None = None) -> Answer | None:
        """Return the cached answer with `tag`, and with `content_hash` if that is given; None if there is none."""
        place = (instance, opaque(tag))
        with self._lock:
            answer = self._kept.get(place)
            if answer is None or (content_hash is not None and answer.hash != content_hash):
                return None
            self._kept.move_to_end(place)
            return answer

    def latest(self, instance: str) -> Answer | None:
        """Return the newest answer of `instance`, most of whose rows the next answer is likely to contain."""
        with self._lock:
            tags = self._tags.get(instance)
            return self._kept[instance, tags[-1]] if tags else None

    def _seen_again(self, instance: str, tag: str, answer: Answer) -> None:
        kept = self._kept[instance, tag]
        if kept is not None and (kept.hash, kept.columns, kept.form) != (answer.hash, answer.columns, answer.form):
            self.bytes -= kept.size
            self._kept[instance, tag] = None
        self._kept.move_to_end((instance, tag))

    def _shrink(self, instance: str) -> None:
        while len(self._tags[instance]) > self._per_instance:
            self._drop(instance, self._tags[instance][0])
        while self.bytes > self._max_bytes:
            self._drop(*next(iter(self._kept)))

    def _drop(self, instance: str, tag: str) -> None:
        answer = self._kept.pop((instance, tag))
        self.bytes -= 0 if answer is None else answer.size
        tags = self._tags[instance]
        tags.remove(tag)
        if not tags:
            del self._tags[instance]
