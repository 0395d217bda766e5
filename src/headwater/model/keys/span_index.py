"""Index of key spans that finds those containing a key, also among thousands of overlapping spans."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from headwater.model.keys.key import Span

T = TypeVar("T", bound=Hashable)
Spans = tuple[Span, ...]


class SpanIndex(Generic[T]):
    """Maps each token to its spans, and finds the tokens by a key in their spans.

    Spans are in layers, each less than half as large as the one before: new spans are merged with the last
    layers that are not larger into one new layer, so that a span is indexed again only a few times.
    """

    def __init__(self) -> None:
        self._fresh: dict[T, Spans] = {}  # in no layer yet
        self._layers: list[_SegmentTree[T]] = []

    def __bool__(self) -> bool:
        return bool(self._fresh or self._layers)

    def add(self, token: T, spans: Spans) -> None:
        """Add a token that is not in the index."""
        self._fresh[token] = spans

    def remove(self, token: T) -> None:
        """Remove a token that is in the index."""
        if self._fresh.pop(token, None) is not None:
            return
        layer = next(layer for layer in self._layers if token in layer.spans)
        layer.remove(token)
        if layer.is_hollow:
            self._layers.remove(layer)
            self._fresh.update(layer.spans)

    def at(self, key: bytes) -> Sequence[Iterable[T]]:
        """Return groups of the tokens with a span that contains `key`; a token may occur more than once."""
        if self._fresh:
            self._lay()
        if len(self._layers) == 1:
            return self._layers[0].at(key)
        return [tokens for layer in self._layers for tokens in layer.at(key)]

    def _lay(self) -> None:
        spans, self._fresh = self._fresh, {}
        while self._layers and len(self._layers[-1].spans) <= 2 * len(spans):
            spans = self._layers.pop().spans | spans
        self._layers.append(_SegmentTree(spans))


class _SegmentTree(Generic[T]):
    """A segment tree: the edges of all spans split the keys into leaves, and a span is stored at few nodes.

    These nodes cover its leaves exactly. Leaf n is node `size + n`, the parent of n is n // 2.
    """

    def __init__(self, spans: dict[T, Spans]) -> None:
        self.spans = spans
        self._first = len(spans)
        edges = {edge for held in spans.values() for span in held for edge in (span.start, span.end)}
        # Copied in sorted order: with 100,000 edges a search touches fewer memory pages, and takes half the time.
        self._edges = [bytes(bytearray(edge)) for edge in sorted(edge for edge in edges if edge is not None)]
        self._size = len(self._edges) + 1
        self._nodes: dict[int, dict[T, None]] = {}
        for token, held in spans.items():
            for node in self._nodes_of(held):
                self._nodes.setdefault(node, {})[token] = None
        self._ways: list[tuple[dict[T, None], ...]] = [()]  # by node, the tokens of all nodes from it to the root
        for node in range(1, 2 * self._size):
            way = self._ways[node >> 1]
            self._ways.append((*way, self._nodes[node]) if node in self._nodes else way)
        self._ways = self._ways[self._size :]  # only the entries of leaves are needed

    @property
    def is_hollow(self) -> bool:
        """Return whether at least half of the tokens were removed."""
        return 2 * len(self.spans) <= self._first

    def remove(self, token: T) -> None:
        """Remove a token; its edges stay."""
        for node in self._nodes_of(self.spans.pop(token)):
            self._nodes.get(node, {}).pop(token, None)  # two spans of one token may share a node

    def at(self, key: bytes) -> Sequence[Iterable[T]]:
        """Return the groups of tokens at the nodes from the leaf of `key` to the root."""
        return self._ways[bisect_right(self._edges, key)]

    def _nodes_of(self, spans: Spans) -> Iterator[int]:
        for span in spans:
            low = self._size + bisect_right(self._edges, span.start)
            high = self._size * 2 if span.end is None else self._size + bisect_right(self._edges, span.end)
            while low < high:
                if low & 1:
                    yield low
                    low += 1
                if high & 1:
                    high -= 1
                    yield high
                low >>= 1
                high >>= 1
