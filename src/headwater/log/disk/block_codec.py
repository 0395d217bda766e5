"""The block codec: a few transactions to checked, compressed bytes and back. Pure.

Changes are written by column (all ops, all before images, …): that compresses better than one by one and
lets both directions run without Python work per value.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, repeat

import msgspec
import zstandard

from headwater.errors import LogDamaged
from headwater.log.disk.block_columns import Remarks, Rows, columns
from headwater.log.transaction_parts import cut_into_blocks, within
from headwater.model.change import Change, Op, Transaction
from headwater.model.row_msgpack import ext_hook, pack_row
from headwater.model.table import Table

PLAIN, ZSTD = 0, 1  # on disk: never renumber
COMPRESS_ABOVE = 4096
MAX_RAW = 4 << 20  # a block of large rows is cut further, so that no reader holds more than this at once


class Block(msgspec.Struct, frozen=True, gc=False):
    """One stored row of the log: columns for lookups, and the encoded changes."""

    first: int
    count: int
    ts_first: int
    ts_last: int
    commit_ms_last: int
    position: str
    id_first: str
    id_last: str
    whole: int | None  # the first offset here at which a transaction begins
    ends: bool  # the last change here is the last of its transaction
    tables: tuple[Table, ...]  # payload shapes are indexes of this
    raw: int
    codec: int
    crc: int
    data: bytes

    @property
    def upto(self) -> int:
        """Return the offset of the last change of the block."""
        return self.first + self.count - 1


class _Payload(msgspec.Struct, array_like=True, gc=False):
    """The encoded changes. The order of fields is on disk: only add at the end."""

    start: int
    last: bool
    counts: list[int]  # changes per transaction
    ids: list[str]
    ts: list[int]  # the first, then differences
    commit_ts_ms: list[int]  # the same
    positions: list[str]
    ops: bytes
    shapes: list[int]  # per change an index of Block.tables; empty when there is only one
    before: Rows
    after: Rows
    remarks: Remarks
    commit_us_rest: list[int] = []  # microseconds beyond commit_ts_ms; empty when there are none


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Payload, ext_hook=ext_hook)
_OPS = {int(op): op for op in Op}


def encode(parts: Iterable[Transaction]) -> Iterator[Block]:
    """Yield the blocks of `parts`, which are whole transactions in order."""
    for group in cut_into_blocks(parts):
        yield from encode_group(group)


def encode_group(group: list[Transaction]) -> Iterator[Block]:
    """Yield the block of a `group` of `cut_into_blocks`; several blocks if it encodes to more than MAX_RAW bytes."""
    first, upto = group[0].first, group[-1].upto
    raw, tables = _write(group)
    if len(raw) > MAX_RAW and upto > first:
        middle = (first + upto) // 2
        yield from encode_group(within(group, first - 1, middle))
        yield from encode_group(within(group, middle, upto))
    else:
        yield _block(group, raw, tables)


def _block(group: list[Transaction], raw: bytes, tables: tuple[Table, ...]) -> Block:
    first, last = group[0], group[-1]
    codec = ZSTD if len(raw) > COMPRESS_ABOVE else PLAIN
    data = zstandard.ZstdCompressor(level=1).compress(raw) if codec == ZSTD else raw
    return Block(
        first=first.first,
        count=last.upto - first.first + 1,
        ts_first=first.ts,
        ts_last=last.ts,
        commit_ms_last=max(part.commit_ts_ms for part in group),
        position=last.position,
        id_first=first.id,
        id_last=last.id,
        whole=next((part.first for part in group if part.start == 0), None),
        ends=last.last,
        tables=tables,
        raw=len(raw),
        codec=codec,
        crc=zlib.crc32(data),
        data=data,
    )


def _write(group: list[Transaction]) -> tuple[bytes, tuple[Table, ...]]:
    changes = group[0].changes if len(group) == 1 else tuple(chain.from_iterable(part.changes for part in group))
    ops, shapes, tables, before, after, remarks, is_plain = columns(changes)
    rests = [part.commit_us_rest for part in group]
    payload = _Payload(
        start=group[0].start,
        last=group[-1].last,
        counts=[len(part.changes) for part in group],
        ids=[part.id for part in group],
        ts=_steps([part.ts for part in group]),
        commit_ts_ms=_steps([part.commit_ts_ms for part in group]),
        positions=[part.position for part in group],
        ops=ops,
        shapes=shapes,
        before=before,
        after=after,
        remarks=remarks,
        commit_us_rest=rests if any(rests) else [],
    )
    return _to_bytes(payload, is_plain), tables


def _steps(values: list[int]) -> list[int]:
    return [values[0], *(late - early for early, late in pairwise(values))]


def _to_bytes(payload: _Payload, is_plain: bool) -> bytes:
    if is_plain:
        try:
            return _encoder.encode(payload)
        except UnicodeEncodeError:
            pass  # text that is not UTF-8: seldom, and only the encoder finds it cheaply
    packed = msgspec.structs.replace(
        payload, before=list(map(pack_row, payload.before)), after=list(map(pack_row, payload.after))
    )
    return _encoder.encode(packed)


def decode(first: int, codec: int, crc: int, data: bytes, tables: Sequence[Table]) -> list[Transaction]:
    """Return the transactions of the block at offset `first`; LogDamaged if its checksum or content is wrong."""
    if zlib.crc32(data) != crc:
        raise LogDamaged(f"the block at offset {first} does not match its checksum")
    try:
        raw = zstandard.ZstdDecompressor().decompress(data) if codec == ZSTD else data
        return _transactions(first, _decoder.decode(raw), tables)
    except (zstandard.ZstdError, msgspec.MsgspecError, LookupError) as error:
        raise LogDamaged(f"the block at offset {first} cannot be read: {error}") from error


def _transactions(first: int, payload: _Payload, tables: Sequence[Table]) -> list[Transaction]:
    changes = _changes(payload, tables)
    counts = payload.counts
    return list(
        map(
            Transaction,
            payload.ids,
            _shares(changes, counts),
            accumulate(counts, initial=first),
            accumulate(payload.ts),
            accumulate(payload.commit_ts_ms),
            chain((payload.start,), repeat(0)),
            chain(repeat(True, len(counts) - 1), (payload.last,)),
            payload.positions,
            payload.commit_us_rest or repeat(0),
        )
    )


def _changes(payload: _Payload, tables: Sequence[Table]) -> tuple[Change, ...]:
    shapes = map(tables.__getitem__, payload.shapes) if payload.shapes else repeat(tables[0])
    ops = map(_OPS.__getitem__, payload.ops)
    changes = tuple(map(Change, ops, shapes, payload.before, payload.after))
    if not payload.remarks:
        return changes
    marked = list(changes)
    for place, (ddl, resnapshot) in payload.remarks.items():
        marked[place] = msgspec.structs.replace(marked[place], ddl=ddl, resnapshot=resnapshot)
    return tuple(marked)


def _shares(changes: tuple[Change, ...], counts: list[int]) -> Iterable[tuple[Change, ...]]:
    if len(counts) == 1:
        return (changes,)
    if len(counts) == len(changes):
        return zip(changes)  # one change each, as single-row commits leave them
    ends = accumulate(counts)
    return map(changes.__getitem__, map(slice, map(operator.sub, ends, counts), accumulate(counts)))
