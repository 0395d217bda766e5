"""Committed transactions from the messages of a stream, in commit order. Pure except for the spills.

    Begin rows Commit                              -> parts while rows are received: a Begin means a commit
    StreamStart rows StreamStop … StreamCommit     -> kept in a spill, decoded at the commit
                              … StreamAbort        -> discarded; of a subtransaction only its rows

A transaction is passed on in parts of at most `part` changes. The position of its last part is the end LSN: a reader
at that LSN has everything before. The other parts have the LSN of the commit, by which `LogEnd` finds the transaction
when the server sends it again from its start. A position is always safe to confirm.

A server without two-phase decoding (the slot decides) sends a prepared transaction at COMMIT PREPARED, like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from headwater.errors import SourceMismatch, SourceUnfit
from headwater.model.change import Change, Op, Transaction
from headwater.sources.postgres.capture.decode import row_decoder as rows
from headwater.sources.postgres.capture.decode.pgoutput import (
    Message,
    Relation,
    StreamAbort,
    StreamCommit,
    StreamStart,
    Truncate,
    Type,
    decode,
    decode_begin,
    decode_commit,
)
from headwater.sources.postgres.capture.decode.replication_frames import DATA_HEAD, BadMessage, lsn_text, unix_us
from headwater.sources.postgres.capture.decode.row_plan import HEAD, Decode, Get
from headwater.sources.postgres.capture.stream.streamed_transaction import NO_FRAME, StreamedTransaction
from headwater.sources.postgres.capture.stream.transaction_spill import FileSpill
from headwater.sources.postgres.schema import ddl_trigger
from headwater.sources.postgres.schema.relations import Relations
from headwater.sources.postgres.schema.shape_changes import Announcement

PART = 512
PART_BYTES = 4 << 20  # of messages, after which a part is cut though it has few changes
PREFIX = "headwater"  # prefix of the barriers among logical messages
SHAPES = "headwater.shapes"  # prefix of announcements


class Barrier(msgspec.Struct, frozen=True):
    """A mark that we wrote into the server's WAL: every commit before the mark was passed on before it."""

    token: str
    lsn: int


class LogEnd(msgspec.Struct, frozen=True):
    """The end of a log. `position` is that of its last part; if that was not the last of its transaction, `start` is
    the number of changes of the transaction in the log, and `rows` how many of them are not schema changes.

    `proof` is the number of the transaction that ends at `position`, where the server is to send it again: a server
    that does not send it has another history, such as a copy of the files that was written to."""

    position: int = 0
    start: int = 0
    rows: int = 0
    proof: str = ""


Item = Transaction | Barrier
T = TypeVar("T")
_NOBODY: dict[bytes, Decode] = {}


class _Head(msgspec.Struct, frozen=True):
    """The transaction whose rows are being received."""

    xid: int
    lsn: int
    commit_ts_us: int  # since 1970


class Assembly:
    """Assembler of transactions from a stream's messages, fed in order. For one thread."""

    def __init__(
        self,
        relations: Relations,
        spills: Callable[[], FileSpill],
        *,
        resume: LogEnd | None = None,
        part: int = PART,
    ) -> None:
        self.end = 0  # the end LSN of the last commit received, empty ones included
        self.weight = 0  # bytes of messages that were put into parts
        self._relations, self._spills, self._part = relations, spills, part
        self._take = rows.twin().take
        self._resume = resume or LogEnd()
        self._proof = self._resume.proof
        self._rows = _NOBODY  # relations.rows while rows are decoded as they are received
        self._head: _Head | None = None
        self._changes: list[Change] = []
        self._weight = self._start = 0
        self._skip = 0  # rows that the log already has; below zero: all of them
        self._barriers: list[Barrier] = []
        self._ahead: dict[int, StreamedTransaction] = {}
        self._stream: StreamedTransaction | None = None  # the transaction whose block is open
        self._steps: dict[int, Callable[[bytes], Iterable[Item]]] = {
            **dict.fromkeys(b"IUD", self._row),
            **dict.fromkeys(b"bPKrp", self._prepared),
            ord("B"): self._begin,
            ord("C"): self._commit,
            ord("R"): self._relation,
            ord("Y"): self._type,
            ord("T"): self._truncate,
            ord("M"): self._message,
            ord("O"): lambda message: (),  # the origin of a transaction that was replicated from another server
            ord("S"): self._stream_start,
            ord("E"): self._stream_stop,
            ord("c"): self._stream_commit,
            ord("A"): self._stream_abort,
        }

    @property
    def is_idle(self) -> bool:
        """Return whether no commit is partly received and the history is proven: then everything sent may be confirmed.

        Transactions sent before their commit do not count: the server sends them again from their start. A prepared one
        may stay open for days, and a server that shuts down waits for our confirmation.
        """
        return self._head is None and not self._proof

    @property
    def is_proven(self) -> bool:
        """Return whether the server is known to have our history, so that its positions count."""
        return not self._proof

    def feed(self, message: bytes) -> Iterable[Item]:
        """Return the items that `message` completes; consume them before feeding the next message."""
        decode_row = self._rows.get(message[:HEAD])
        if decode_row is not None:
            changes, weight = self._changes, self._weight
            if len(changes) < self._part and weight < PART_BYTES:
                changes.append(decode_row(message))
                self._weight = weight + len(message)
                return ()
            return self._append(decode_row(message), len(message))
        step = self._steps.get(message[0] if message else -1)
        if step is None:
            raise BadMessage(f"a message {message[:1]!r} of {len(message)} bytes: its type is unknown")
        return step(message)

    def take(self, get: Get) -> tuple[int, memoryview]:
        """Return the next frame for `feed`, or the reason there is none; the rows before it are already decoded."""
        if self._stream is not None:
            return self._stream.keep(get, PART)
        if self._rows is _NOBODY:
            return get(1)
        size, frame, weight = self._take(get, self._rows, self._changes, self._part, PART_BYTES - self._weight)
        self._weight += weight
        return size, frame

    def close(self) -> None:
        """Discard everything unfinished: the server sends it again on the next connection."""
        for each in self._ahead.values():
            each.spill.drop()
        self._ahead.clear()

    # --- a transaction whose rows are being received -------------------------------------------------------

    def _begin(self, message: bytes) -> Iterable[Item]:
        found = decode_begin(message)
        if self._head is not None or self._stream is not None:
            raise BadMessage(f"transaction {found.xid} begins inside another one")
        self._open(_Head(found.xid, found.lsn, unix_us(found.commit_us)))
        return ()

    def _open(self, head: _Head) -> None:
        self._head, self._changes, self._weight, self._start, self._skip = head, [], 0, 0, 0
        if head.lsn < self._resume.position:
            self._skip = -1
        elif self._proof:
            raise self._other_history()
        elif head.lsn == self._resume.position:
            self._skip, self._start = self._resume.rows, self._resume.start
        self._rows = _NOBODY if self._skip else self._relations.rows

    def _commit(self, message: bytes) -> Iterable[Item]:
        return self._finish(decode_commit(message))

    def _finish(self, end: int) -> list[Item]:
        if self._head is None:
            raise BadMessage("a commit without a transaction")
        if self._proof and end >= self._resume.position:
            if (end, str(self._head.xid)) != (self._resume.position, self._proof):
                raise self._other_history()
            self._proof = ""
        found: list[Item] = []
        if self._changes:
            found.append(self._cut(end))
        elif self._start:
            raise SourceMismatch(
                f"the log has {self._start} changes of transaction {self._head.xid}, the server sends fewer",
                hint="The slot or the server was replaced. Take a new snapshot.",
            )
        found += self._barriers
        self._barriers, self._head, self._rows, self.end = [], None, _NOBODY, end
        return found

    def _other_history(self) -> SourceMismatch:
        return SourceMismatch(
            f"the server's log has no transaction {self._proof} that ends at {lsn_text(self._resume.position)}, where "
            "our log ends: the server is a copy or was restored, and its history differs",
            hint="Readers need a new snapshot.",
        )

    def _append(self, change: Change, weight: int = 0) -> tuple[Item, ...]:
        """Add a change; return the part that was full. A part is cut once a change follows, so that none is empty."""
        is_full = self._changes and (len(self._changes) >= self._part or self._weight >= PART_BYTES)
        found = (self._cut(None),) if is_full else ()
        self._changes.append(change)
        self._weight += weight
        return found

    def _cut(self, end: int | None) -> Transaction:
        head = self._head
        assert head is not None
        part = Transaction(
            str(head.xid),
            tuple(self._changes),
            commit_ts_ms=head.commit_ts_us // 1000,
            start=self._start,
            last=end is not None,
            position=lsn_text(head.lsn if end is None else end),
            commit_us_rest=head.commit_ts_us % 1000,
        )
        self._start += len(self._changes)
        self.weight += self._weight
        self._changes, self._weight = [], 0
        return part

    # --- messages inside a transaction ---------------------------------------------------------------------

    def _is_held(self, message: bytes) -> bool:
        """Keep `message` if it belongs to an unfinished transaction; return whether it does."""
        if self._stream is not None:
            self._stream.spill.append(message)
            return True
        if self._head is None:
            raise BadMessage(f"a message {message[:1]!r} outside of any transaction")
        return False

    def _is_skipped(self) -> bool:
        """Return whether the log already has the next row, and count it."""
        if self._skip > 0:
            self._skip -= 1
            if not self._skip:
                self._rows = self._relations.rows
            return True
        return self._skip < 0

    def _row(self, message: bytes) -> Iterable[Item]:
        if self._is_held(message) or self._is_skipped():
            return ()
        found = self._ready(int.from_bytes(message[1:5], "big"))
        change = self._relations.decoder(message)(message)
        return [*found, *self._append(change, len(message))]

    def _ready(self, oid: int) -> list[Item]:
        if self._relations.is_ready(oid):
            return []
        xid = self._head.xid if self._head is not None else 0
        return [part for change in self._relations.need(oid, xid) for part in self._append(change)]

    def _truncate(self, message: bytes) -> Iterable[Item]:
        if self._is_held(message):
            return ()
        found: list[Item] = []
        for oid in _expect(Truncate, message).oids:
            if not self._is_skipped():
                found += self._ready(oid)
                xid = self._head.xid if self._head is not None else 0
                found += self._append(Change(Op.TRUNCATE, self._relations.truncate(oid, xid)))
        return found

    def _relation(self, message: bytes) -> Iterable[Item]:
        if self._stream is not None:
            found = _expect(Relation, message, in_stream=True)
            self._stream.described[found.oid] = self._relations.clock
            self._stream.spill.append(message)
        else:
            self._relations.add_relation(_expect(Relation, message))
        return ()

    def _type(self, message: bytes) -> Iterable[Item]:
        if self._stream is not None:
            self._stream.spill.append(message)
        else:
            self._relations.add_type(_expect(Type, message))
        return ()

    def _message(self, message: bytes) -> Iterable[Item]:
        found = _expect(Message, message, in_stream=self._stream is not None)
        if found.prefix not in (PREFIX, SHAPES, ddl_trigger.PREFIX):
            return ()
        if self._stream is not None and found.transactional:
            self._stream.spill.append(message)
            return ()
        barrier = Barrier(found.content.decode("utf-8", "replace"), found.lsn)
        if not found.transactional:
            return (barrier,) if found.prefix == PREFIX else ()
        if self._head is None:
            raise BadMessage("a transactional message outside of any transaction")
        if found.prefix == SHAPES:
            return self._changed(found.content, Announcement, self._relations.announce)
        if found.prefix == ddl_trigger.PREFIX:
            return self._changed(found.content, ddl_trigger.Statement, self._relations.show_statement)
        self._barriers.append(barrier)
        return ()

    def _changed(self, content: bytes, kind: type[T], apply: Callable[[T], list[Change]]) -> list[Item]:
        """Add the changes that a logical message with the content `kind` causes."""
        told = None if self._skip else _read(content, kind)
        changes = [] if told is None else apply(told)
        return [part for change in changes for part in self._append(change)]

    def _prepared(self, message: bytes) -> Iterable[Item]:
        raise SourceUnfit(
            "the replication slot sends transactions when they are prepared, before it is known whether they commit",
            hint="Create the slot without TWO_PHASE.",
        )

    # --- transactions sent before their commit -------------------------------------------------------------

    def _stream_start(self, message: bytes) -> Iterable[Item]:
        found = _expect(StreamStart, message)
        if self._head is not None or self._stream is not None:
            raise BadMessage(f"a block of transaction {found.xid} inside another one")
        if found.xid not in self._ahead:
            if not found.is_first:
                raise BadMessage(f"transaction {found.xid} continues, but its beginning was not sent")
            self._ahead[found.xid] = StreamedTransaction(self._spills())
        self._stream = self._ahead[found.xid]
        return ()

    def _stream_stop(self, message: bytes) -> Iterable[Item]:
        if self._stream is None:
            raise BadMessage("the end of a block that was not begun")
        self._stream = None
        return ()

    def _stream_abort(self, message: bytes) -> Iterable[Item]:
        found = _expect(StreamAbort, message)
        ahead = self._ahead.get(found.xid)
        if ahead is None:
            return ()  # none of its messages was sent
        if found.subxid == found.xid:
            del self._ahead[found.xid]
            ahead.spill.drop()
        else:
            ahead.aborted.add(found.subxid)
        return ()

    def _stream_commit(self, message: bytes) -> Iterable[Item]:
        found = _expect(StreamCommit, message)
        if found.xid not in self._ahead or self._head is not None or self._stream is not None:
            raise BadMessage(f"a commit of transaction {found.xid}, which was not sent before, or inside another one")
        return self._replay(self._ahead.pop(found.xid), found)

    def _replay(self, ahead: StreamedTransaction, commit: StreamCommit) -> Iterator[Item]:
        """Feed the kept messages as if received now. Table descriptions of a rolled-back subtransaction are discarded
        with it: the server repeats those that still hold."""
        relations = self._relations
        newer = [relations.described_after(oid, clock) for oid, clock in ahead.described.items()]
        try:
            self._open(_Head(commit.xid, commit.lsn, unix_us(commit.commit_us)))
            kept = ahead.frames()
            while frame := self.take(lambda _: next(kept, NO_FRAME))[1]:
                yield from self.feed(bytes(frame[DATA_HEAD:]))
            yield from self._finish(commit.end)
        finally:
            ahead.spill.drop()
        for relation in newer:  # received by transactions committed in between, and valid for the next
            if relation is not None:
                relations.add_relation(relation)


def _read(content: bytes, kind: type[T]) -> T | None:
    """Return the content of a logical message; None if it is not of this form: any role may write such a message."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _expect(kind: type[T], message: bytes, *, in_stream: bool = False) -> T:
    found = decode(message, in_stream=in_stream)
    assert isinstance(found, kind)
    return found
