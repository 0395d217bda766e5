"""If-Match and If-None-Match by RFC 9110 §13: parsing, comparison, and the resulting status."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

import msgspec

from headwater.errors import InvalidRequest

SAFE = ("GET", "HEAD")
ENCODED = ("-gzip", "-br")  # suffixes that Apache adds to a tag when it compresses the answer
MAX_TAGS = 256  # of one header: more would block the event loop
HINT = 'Tags are quoted, with commas between them: "a", W/"b". Or send * alone.'

_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')
_GAP = re.compile(r"[ \t,]*")


class Tag(msgspec.Struct, frozen=True):
    """One entity tag."""

    opaque: str
    weak: bool = False

    @classmethod
    def of(cls, text: str) -> Tag:
        """Return the tag in `text`, which includes the quotes."""
        found = _TAG.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not an entity tag")
        return cls(found[2], found[1] is not None)

    def __str__(self) -> str:
        return f'{"W/" if self.weak else ""}"{self.opaque}"'


class Tags(msgspec.Struct, frozen=True):
    """The value of one of the two headers: `*`, or a list of tags, which may be empty."""

    any: bool = False
    tags: tuple[Tag, ...] = ()

    @classmethod
    def parse(cls, header: bytes | str) -> Tags | None:
        """Parse the value of a header; return None if it is malformed or has more than MAX_TAGS tags."""
        text = header.decode("latin-1") if isinstance(header, bytes) else header
        if text.count('"') > 2 * MAX_TAGS:
            return None
        if text.strip(" \t") == "*":
            return cls(any=True)
        found: list[Tag] = []
        place, apart = 0, True
        while (gap := _gap(text, place)) < len(text):
            one = _TAG.match(text, gap)
            if one is None or not (apart or "," in text[place:gap]):
                return None
            found.append(Tag(one[2], one[1] is not None))
            place, apart = one.end(), False
        return cls(tags=tuple(found))

    @property
    def opaque(self) -> list[str]:
        """Return the tags without quotes."""
        return [tag.opaque for tag in self.tags]

    def matches_strong(self, tag: str) -> bool:
        """Return whether `tag` is in the list, and both are strong."""
        wanted = Tag.of(tag)
        return not wanted.weak and wanted in self.tags

    def weakly(self, tag: str) -> Tag | None:
        """Return the listed tag that `tag` matches, weak or strong, also with the suffix of a compressing proxy.

        It is as the client wrote it: a 304 has to repeat it.
        """
        wanted = Tag.of(tag).opaque
        known = {wanted, *(wanted + suffix for suffix in ENCODED)}
        return next((one for one in self.tags if one.opaque in known), None)


class Verdict(Enum):
    """The result of evaluating the preconditions of a request."""

    GO_ON = "go on"
    NOT_MODIFIED = "304"
    FAILED = "412"


class Outcome(msgspec.Struct, frozen=True):
    """The verdict; with NOT_MODIFIED also the tag for the answer, as the client sent it."""

    verdict: Verdict
    tag: str | None = None


class Conditions(msgspec.Struct, frozen=True):
    """The two headers of a request; None for a header that was not sent."""

    if_match: Tags | None = None
    if_none_match: Tags | None = None

    @classmethod
    def of(cls, method: str, headers: Iterable[tuple[bytes, bytes]]) -> Conditions:
        """Return the preconditions of a request; several lines of one header form one list.

        A malformed header is rejected, because a conditional write must not run without its condition. Only a
        malformed If-None-Match of a read is ignored: the full answer is always correct.
        """
        lines: dict[bytes, list[bytes]] = {b"if-match": [], b"if-none-match": []}
        for name, value in headers:
            if name in lines:
                lines[name].append(value)
        found = {name: Tags.parse(b",".join(values)) for name, values in lines.items() if values}
        for name, tags in found.items():
            if tags is None and not (name == b"if-none-match" and method in SAFE):
                raise InvalidRequest(
                    f"the header {name.decode()} is malformed or has more than {MAX_TAGS} tags", hint=HINT
                )
        return cls(found.get(b"if-match"), found.get(b"if-none-match"))

    def decide(self, method: str, etag: str | None, *, also: tuple[str, ...] = ()) -> Outcome:
        """Evaluate the headers in the order of RFC 9110 §13.2.2, for the current `etag`.

        `etag` is None if the resource does not exist. `also` are tags of the same state in other formats, which
        If-Match accepts too. Call it only if the answer would be a 2xx otherwise: the headers do not apply to a 404
        (§13.2.1).
        """
        if self.if_match is not None and not _holds(self.if_match, etag, also):
            return Outcome(Verdict.FAILED)
        if self.if_none_match is None or etag is None:
            return Outcome(Verdict.GO_ON)
        if method in SAFE:
            seen = self.if_none_match.weakly(etag)
            if seen is not None or self.if_none_match.any:
                return Outcome(Verdict.NOT_MODIFIED, etag if seen is None else str(seen))
        elif self.if_none_match.any or any(self.if_none_match.weakly(tag) for tag in (etag, *also)):
            return Outcome(Verdict.FAILED)
        return Outcome(Verdict.GO_ON)


def _holds(if_match: Tags, etag: str | None, also: tuple[str, ...]) -> bool:
    if etag is None:
        return False
    return if_match.any or any(if_match.matches_strong(tag) for tag in (etag, *also))


def _gap(text: str, place: int) -> int:
    """Return the end of the blanks and commas after `place`."""
    found = _GAP.match(text, place)
    return place if found is None else found.end()
