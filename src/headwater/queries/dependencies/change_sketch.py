"""Upper bounds for the last relevant change of any instance, tracked or not, in bounded memory.

Each signature (a table, the columns that are read, and the columns compared with given values) has slots; a slot
holds the last offset of a change to rows whose values hash to it. Instances that share a slot only lose precision.
"""

from __future__ import annotations

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from headwater.model.change import Change
from headwater.model.table import Column
from headwater.queries.dependencies.bound_dependencies import BoundDependencies, TableReference
from headwater.queries.dependencies.column_bytes import View, difference
from headwater.queries.dependencies.template import SPANS, Path, Template, Values, is_unclear

SLOTS = 4_096
MOST = 256  # signatures; all of them take 8 MiB
Signature = tuple[str, frozenset[str] | None, tuple[str, ...], tuple[Column, ...]]


class Sketch:
    """The sketch of one database. Not thread-safe."""

    def __init__(self, start: int, *, slots: int = SLOTS, most: int = MOST) -> None:
        self._offset = start  # of the last applied change
        self._slots = slots
        self._most = most
        self._records: OrderedDict[Signature, _Record] = OrderedDict()  # the least recently used first
        self._tables: dict[str, dict[Signature, _Record]] = {}

    def apply(self, offset: int, change: Change) -> None:
        """Apply `change`; offsets must ascend."""
        self._offset = offset
        for record in self._tables.get(change.table.name, {}).values():
            record.apply(offset, change)

    def version(self, bound: BoundDependencies) -> int:
        """Return an offset after which no applied change was relevant to `bound`."""
        return max((self._record(each).version(each) for each in bound.references), default=0)

    def __len__(self) -> int:
        return len(self._records)

    def _record(self, reference: TableReference) -> _Record:
        template, path = reference.template, _exact_path(reference.template)
        columns = () if path is None else path.columns
        signature = template.table, template.columns, columns, template.definitions
        record = self._records.get(signature)
        if record is None:
            record = self._make(signature, template, path)
        self._records.move_to_end(signature)
        return record

    def _make(self, signature: Signature, template: Template, path: Path | None) -> _Record:
        """Add a record that starts at the current offset: earlier relevant changes are not known."""
        while len(self._records) >= self._most:
            dropped, _ = self._records.popitem(last=False)
            del self._tables[dropped[0]][dropped]
        made = _Record(template, path, self._offset, self._slots)
        self._records[signature] = self._tables.setdefault(template.table, {})[signature] = made
        return made


def _exact_path(template: Template) -> Path | None:
    """Return the path whose columns select the slot, if the condition compares one set of columns with exact values."""
    (path, *more) = template.paths or (None,)
    return None if path is None or more or path.kind == SPANS else path


class _Record:
    """The slots of one signature. It keeps the first template of the signature, and uses only its columns."""

    def __init__(self, template: Template, path: Path | None, offset: int, slots: int) -> None:
        self._template = template
        self._columns = () if path is None else path.columns
        self._floor = offset  # lower bound for every slot
        self._slots = array("Q", [0]) * (1 if path is None else slots)

    def version(self, reference: TableReference) -> int:
        """Return the highest offset in the slots of `reference`, which has this signature."""
        if reference.template.tree is False:
            return self._floor  # no row fulfils the condition
        path = _exact_path(reference.template)
        wanted = ((),) if path is None else _wanted(path, reference.values)
        return max(self._floor, *(self._slots[self._slot(cells)] for cells in wanted))

    def apply(self, offset: int, change: Change) -> None:
        """Record `offset` in the slots to which the change may be relevant; on any error in all of them."""
        try:
            self._apply(offset, change)
        except Exception:  # a change must never be missed
            self._floor = offset

    def _apply(self, offset: int, change: Change) -> None:
        fit = None if is_unclear(change) else self._template.fit(change.table)
        if fit is None:
            self._floor = offset
            return
        before, after = change.before, change.after
        if before is not None and after is not None and not difference(fit.watched, before, after):
            return
        at = [change.table.index[name] for name in self._columns]
        for view in (View(fit.shape, row) for row in (before, after) if row is not None):
            cells = [view[place] for place in at]
            if None in cells:
                self._floor = offset
            else:
                self._slots[self._slot(cells)] = offset  # type: ignore[arg-type]

    def _slot(self, cells: Iterable[bytes]) -> int:
        # CRC-32 is the same in every process; Python's own hash is salted.
        return zlib.crc32(b"".join(cells)) % len(self._slots)


def _wanted(path: Path, values: Values) -> Iterable[tuple[bytes, ...]]:
    """Return the combinations of bytes that the columns of `path` may hold."""
    held = [values[slot] for slot in path.slots]
    if len(held) == 1 and isinstance(held[0], frozenset):
        return [(point,) for point in held[0]]
    return [tuple(point for point in held if isinstance(point, bytes))]
