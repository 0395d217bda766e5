"""If-Match and If-None-Match by RFC 9110 §13: what the two headers say, and what follows from them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

import msgspec

from headwater.errors import InvalidRequest

SAFE = ("GET", "HEAD")
ENCODED = ("-gzip", "-br")  # what Apache puts behind a tag when it compresses the answer
HINT = 'Tags are quoted, with commas between them: "a", W/"b". Or send * alone.'

_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')
_GAP = re.compile(r"[ \t,]*")


class Tag(msgspec.Struct, frozen=True):
    """One entity tag."""

    opaque: str
    weak: bool = False

    @classmethod
    def of(cls, text: str) -> Tag:
        """The tag written `text`, quotes and all."""
        found = _TAG.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not an entity tag")
        return cls(found[2], found[1] is not None)

    def __str__(self) -> str:
        return f'{"W/" if self.weak else ""}"{self.opaque}"'


class Tags(msgspec.Struct, frozen=True):
    """What one of the two headers names: any state at all (`*`), or a list of tags, which may be empty."""

    any: bool = False
    tags: tuple[Tag, ...] = ()

    @classmethod
    def parse(cls, header: bytes | str) -> Tags | None:
        """What `header` holds; None if that is not what the grammar allows."""
        text = header.decode("latin-1") if isinstance(header, bytes) else header
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
        """What stands inside the quotes of each tag."""
        return [tag.opaque for tag in self.tags]

    def matches_strong(self, tag: str) -> bool:
        """Whether `tag` is in the list, and both are strong."""
        wanted = Tag.of(tag)
        return not wanted.weak and wanted in self.tags

    def matches_weak(self, tag: str) -> bool:
        """Whether `tag` is in the list, weak or strong, or as a proxy that compresses has changed it."""
        return self.weakly(tag) is not None

    def weakly(self, tag: str) -> Tag | None:
        """The tag in the list that `tag` matches, as the client wrote it: a 304 has to repeat it."""
        wanted = Tag.of(tag).opaque
        known = {wanted, *(wanted + suffix for suffix in ENCODED)}
        return next((one for one in self.tags if one.opaque in known), None)


class Verdict(Enum):
    """What becomes of a request."""

    GO_ON = "go on"
    NOT_MODIFIED = "304"
    FAILED = "412"


class Outcome(msgspec.Struct, frozen=True):
    """The verdict; with NOT_MODIFIED the tag for the answer: the client's own."""

    verdict: Verdict
    tag: str | None = None


class Conditions(msgspec.Struct, frozen=True):
    """The two headers of a request; None where one was not sent."""

    if_match: Tags | None = None
    if_none_match: Tags | None = None

    @classmethod
    def of(cls, method: str, headers: Iterable[tuple[bytes, bytes]]) -> Conditions:
        """Those of a request; lines of one name are one list.

        What cannot be read is refused, because a write that was meant to be conditional must not go through
        without its condition. Only If-None-Match of a read is left out then: the whole answer is always right.
        """
        lines: dict[bytes, list[bytes]] = {b"if-match": [], b"if-none-match": []}
        for name, value in headers:
            if name in lines:
                lines[name].append(value)
        found = {name: Tags.parse(b",".join(values)) for name, values in lines.items() if values}
        for name, tags in found.items():
            if tags is None and not (name == b"if-none-match" and method in SAFE):
                raise InvalidRequest(f"the header {name.decode()} cannot be read", hint=HINT)
        return cls(found.get(b"if-match"), found.get(b"if-none-match"))

    def decide(self, method: str, etag: str | None, *, also: tuple[str, ...] = ()) -> Outcome:
        """See `decide`."""
        return decide(method, etag, self.if_match, self.if_none_match, also=also)


def decide(
    method: str,
    etag: str | None,
    if_match: Tags | None,
    if_none_match: Tags | None,
    *,
    also: tuple[str, ...] = (),
) -> Outcome:
    """What the headers demand of `method`, in the order of RFC 9110 §13.2.2, where `etag` is current.

    None is a thing that is not there. `also` are tags of the same state in other forms, as good in If-Match.
    Ask only where the answer would be a 2xx otherwise: the headers say nothing about a 404 (§13.2.1).
    """
    if if_match is not None and not _holds(if_match, etag, also):
        return Outcome(Verdict.FAILED)
    if if_none_match is None or etag is None:
        return Outcome(Verdict.GO_ON)
    if method in SAFE:
        seen = if_none_match.weakly(etag)
        if seen is not None or if_none_match.any:
            return Outcome(Verdict.NOT_MODIFIED, etag if seen is None else str(seen))
    elif if_none_match.any or any(if_none_match.matches_weak(tag) for tag in (etag, *also)):
        return Outcome(Verdict.FAILED)
    return Outcome(Verdict.GO_ON)


def _holds(if_match: Tags, etag: str | None, also: tuple[str, ...]) -> bool:
    if etag is None:
        return False
    return if_match.any or any(if_match.matches_strong(tag) for tag in (etag, *also))


def _gap(text: str, place: int) -> int:
    """Where the blanks and commas after `place` end."""
    found = _GAP.match(text, place)
    return place if found is None else found.end()
