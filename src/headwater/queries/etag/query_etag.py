"""ETags of query answers: a prefix that identifies the instance, and an offset at which the answer was current.

Any offset at which the content was the same will do: a tag is current while no change after its offset is relevant
to the query. So tags need no memory, and stay valid across processes and restarts.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable

import msgspec

from headwater.model.literal import Value
from headwater.model.row_msgpack import encode_row

FORMAT = "2"  # increase it whenever the answer of the same instance may have other bytes
EXTRACTOR = "1"  # increase it whenever the analysis of the same query may find fewer dependencies
LONG = 1_024  # bytes of encoded arguments; longer ones are hashed
_DIGEST = b"\xc1"  # prefix of a hash: no encoded row begins with this byte

_TAG = re.compile(r"([A-Za-z0-9_-]{16})\.([0-9a-f]{1,15})(?:-gzip|-br)?\Z")  # a compressing proxy adds the suffix


class QueryTag(msgspec.Struct, frozen=True):
    """The parsed content of a tag, without quotes."""

    prefix: str
    offset: int

    def write(self, *, weak: bool = False) -> str:
        """Return the tag as the value of a header."""
        return f'{"W/" if weak else ""}"{self.prefix}.{self.offset:x}"'


def read_tag(opaque: str) -> QueryTag | None:
    """Parse a tag without quotes; return None if it is not a query tag."""
    found = _TAG.match(opaque)
    return None if found is None else QueryTag(found[1], int(found[2], 16))


def tag_prefix(
    *, db: str, generation: str, epoch: str, sql: str, names: Iterable[str], packed: bytes, format: str
) -> str:
    """Return the prefix of an instance's tags in one format.

    It differs for all that determines an answer except the rows. `names` are those of the arguments, and
    `packed` is the result of `pack_args`.
    """
    digest = hashlib.blake2b(digest_size=12)
    # The empty text means nothing: without it, all tags that clients hold would become stale.
    digest.update(encode_row((FORMAT, EXTRACTOR, db, generation, epoch, sql, format, "", *names)))
    digest.update(packed)
    return base64.urlsafe_b64encode(digest.digest()).decode()


def pack_args(args: Iterable[tuple[str, Value]]) -> bytes:
    """Return the values as bytes, hashed if long; 1.0 and 1.00 differ, as do 0.0 and -0.0, and values of two types."""
    encoded = encode_row(tuple(value for _, value in args))
    return encoded if len(encoded) <= LONG else _DIGEST + hashlib.blake2b(encoded).digest()
