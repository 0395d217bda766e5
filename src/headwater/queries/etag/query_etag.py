"""The tag of a query's answer: a prefix that names the question, and an offset at which the answer was current.

Any offset will do at which the content was that: a tag is valid while nothing that matters to the query came
after its offset. So it needs no memory, and holds across processes and restarts.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping

import msgspec

from headwater.model.literal import Value
from headwater.model.row_msgpack import encode_row

FORMAT = "2"  # raise it whenever the same question could be answered in other bytes
EXTRACTOR = "1"  # raise it whenever dependencies of the same query may come out smaller
LONG = 1_024  # bytes of encoded arguments: more are kept as a digest
_DIGEST = b"\xc1"  # before a digest: no encoded row begins with this byte

_TAG = re.compile(r"([A-Za-z0-9_-]{16})\.([0-9a-f]{1,15})(?:-gzip|-br)?\Z")  # the end is a proxy's


class QueryTag(msgspec.Struct, frozen=True):
    """What stands inside the quotes."""

    prefix: str
    offset: int

    def write(self, *, weak: bool = False) -> str:
        """As a header has it."""
        return f'{"W/" if weak else ""}"{self.prefix}.{self.offset:x}"'


def read_tag(opaque: str) -> QueryTag | None:
    """The tag in `opaque`; None if it is none of ours."""
    found = _TAG.match(opaque)
    return None if found is None else QueryTag(found[1], int(found[2], 16))


class Question(msgspec.Struct, frozen=True):
    """All that decides what an answer means, but for the rows."""

    db: str
    generation: str
    epoch: str
    sql: str
    args: tuple[tuple[str, Value], ...]
    format: str
    scope: str = ""  # whose rows are seen, where that is not everybody's
    packed: bytes = b""  # `pack_args` of the arguments, where that was done already

    @property
    def prefix(self) -> str:
        """Another one for every other question."""
        digest = hashlib.blake2b(digest_size=12)
        texts = (FORMAT, EXTRACTOR, self.db, self.generation, self.epoch, self.sql, self.format, self.scope)
        digest.update(encode_row((*texts, *(name for name, _ in self.args))))
        digest.update(self.packed or pack_args(self.args))
        return base64.urlsafe_b64encode(digest.digest()).decode()


def pack_args(args: Iterable[tuple[str, Value]]) -> bytes:
    """Return bytes that are equal exactly for equal values of equal types; short ones however long the values are."""
    encoded = encode_row(tuple(value for _, value in args))
    return encoded if len(encoded) <= LONG else _DIGEST + hashlib.blake2b(encoded).digest()


def sorted_args(args: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    """Arguments in the one order that counts."""
    return tuple(sorted(args.items()))
