"""The assembly of transactions without a server: cases that a real one seldom produces."""

import struct
from pathlib import Path

import pytest
from tests.sources.postgres.capture import pg_messages as pg
from tests.sources.postgres.pg_server import feed, tokens

from headwater.errors import SourceMismatch, SourceUnfit
from headwater.model.change import Op, Transaction
from headwater.sources.postgres.capture.decode.replication_frames import BadMessage, lsn_text
from headwater.sources.postgres.capture.stream.transaction_assembly import PART_BYTES, Assembly, Item, LogEnd
from headwater.sources.postgres.capture.stream.transaction_spill import FileSpill
from headwater.sources.postgres.schema.relations import Relations

NARROW, WIDE = {"id": 23}, {"id": 23, "v": 25}


def assembly(resume: LogEnd | None = None, part: int = 512, relations: Relations | None = None) -> Assembly:
    return Assembly(relations or pg.relations(), FileSpill, resume=resume, part=part)


def keys(items: list[Item]) -> list[int]:
    """Return the first value of each row change."""
    parts = [item for item in items if isinstance(item, Transaction)]
    return [(c.after or c.before or (None,))[0] for part in parts for c in part.changes if c.op <= Op.DELETE]  # type: ignore[misc]


def test_parts_of_a_transaction_are_cut_at_the_limit_and_never_empty() -> None:
    inserts = [pg.insert(b"%d" % number) for number in range(4)]
    items = feed(assembly(part=5), [pg.begin(1, 10), pg.relation(NARROW), *inserts, pg.commit(10)])
    assert [(len(i.changes), i.last) for i in items if isinstance(i, Transaction)] == [(5, True)]
    items = feed(assembly(part=2), [pg.begin(1, 10), pg.relation(NARROW), *inserts, pg.commit(10)])
    assert [(len(i.changes), i.start, i.last, i.position) for i in items if isinstance(i, Transaction)] == [
        (2, 0, False, lsn_text(10)),
        (2, 2, False, lsn_text(10)),
        (1, 4, True, lsn_text(20)),
    ]


def test_part_of_large_rows_is_cut_by_size() -> None:
    large = [pg.insert(b"%d" % number, b"x" * (PART_BYTES // 2)) for number in range(5)]
    items = feed(assembly(), [pg.begin(1, 10), pg.relation(WIDE), *large, pg.commit(10)])
    assert [len(item.changes) for item in items if isinstance(item, Transaction)] == [3, 2, 1]


def test_empty_transaction_advances_the_end_and_yields_nothing() -> None:
    one = assembly()
    assert feed(one, [pg.begin(1, 10), pg.commit(10)]) == []
    assert (one.end, one.is_idle) == (20, True)


def test_rows_of_a_rolled_back_subtransaction_are_removed_and_the_rest_are_kept() -> None:
    one = assembly()
    items = feed(
        one,
        [
            pg.stream_start(7),
            pg.relation(NARROW, xid=7),
            pg.insert(b"1", xid=7),
            pg.insert(b"2", xid=8),
            pg.message("headwater", b"gone", xid=8),
            pg.insert(b"3", xid=9),
            pg.message("headwater", b"kept", xid=9),
            pg.STREAM_STOP,
            pg.begin(20, 5),
            pg.relation(NARROW),
            pg.insert(b"100"),
            pg.commit(5),
            pg.stream_abort(7, 8),
            pg.stream_start(7, first=False),
            pg.insert(b"4", xid=7),
            pg.STREAM_STOP,
            pg.stream_commit(7, 50),
        ],
    )
    assert keys(items) == [100, 1, 3, 4]
    assert tokens(items) == ["kept"]
    assert one.is_idle


def test_table_described_during_a_streamed_transaction_keeps_its_newer_shape() -> None:
    one = assembly()
    items = feed(
        one,
        [
            pg.stream_start(7),
            pg.relation(NARROW, xid=7),
            pg.insert(b"1", xid=7),
            pg.STREAM_STOP,
            pg.begin(20, 5),
            pg.relation(WIDE),
            pg.insert(b"2", b"two"),
            pg.commit(5),
            pg.stream_commit(7, 50),
            pg.begin(21, 70),
            pg.insert(b"3", b"three"),
            pg.commit(70),
        ],
    )
    rows = [c.after for i in items if isinstance(i, Transaction) for c in i.changes if c.op is Op.INSERT]
    assert rows == [(2, "two"), (1,), (3, "three")]


def test_tables_described_in_a_streamed_transaction_are_known_after_it() -> None:
    one = assembly()
    streamed = [pg.stream_start(7), pg.relation(NARROW, xid=7), pg.insert(b"1", xid=7), pg.STREAM_STOP]
    assert keys(feed(one, [*streamed, pg.stream_commit(7, 50)])) == [1]
    assert keys(feed(one, [pg.begin(8, 60), pg.insert(b"2"), pg.commit(60)])) == [2]


def test_logged_transactions_are_skipped_and_their_tables_are_remembered() -> None:
    said = [
        *(pg.begin(1, 10), pg.relation(NARROW), pg.insert(b"1"), pg.commit(10)),
        *(pg.stream_start(7), pg.relation(WIDE, oid=5, name="u", xid=7), pg.insert(b"2", b"", oid=5, xid=7)),
        *(pg.STREAM_STOP, pg.stream_commit(7, 20)),
        *(pg.begin(2, 30), pg.insert(b"3"), pg.insert(b"4", b"", oid=5), pg.commit(30)),
    ]
    assert keys(feed(assembly(), said)) == [1, 2, 3, 4]
    assert keys(feed(assembly(LogEnd(20)), said)) == [2, 3, 4]
    assert keys(feed(assembly(LogEnd(30)), said)) == [3, 4]
    assert keys(feed(assembly(LogEnd(40)), said)) == []


def test_server_that_sends_fewer_rows_than_were_logged_is_refused() -> None:
    with pytest.raises(SourceMismatch, match="fewer"):
        feed(
            assembly(LogEnd(10, start=5, rows=4)),
            [pg.begin(1, 10), pg.relation(NARROW), pg.insert(b"1"), pg.commit(10)],
        )


@pytest.mark.parametrize("message", pg.PREPARED.values())
def test_two_phase_slots_are_refused_with_a_remedy(message: bytes) -> None:
    with pytest.raises(SourceUnfit, match="prepared") as caught:
        assembly().feed(message)
    assert "TWO_PHASE" in caught.value.hint


@pytest.mark.parametrize(
    "messages",
    [
        [b""],
        [b"?"],
        [pg.commit(10)],
        [pg.insert(b"1")],
        [pg.begin(1, 10), pg.begin(2, 20)],
        [pg.begin(1, 10), pg.insert(b"1")],
        [pg.begin(1, 10), pg.relation(NARROW), pg.row(b"I", b"X\0\0")],
        [pg.begin(1, 10), pg.stream_start(7)],
        [pg.begin(1, 10), b"I"],
        [pg.message("headwater", b"")],
        [pg.stream_start(7, first=False)],
        [pg.stream_start(7), pg.stream_start(8)],
        [pg.stream_start(7), pg.begin(1, 10)],
        [pg.STREAM_STOP],
        [pg.stream_commit(7, 10)],
        [b"T" + struct.pack(">IBI", 1, 0, 5)],
        [pg.stream_start(7), b"I", pg.STREAM_STOP, pg.stream_commit(7, 10)],
    ],
)
def test_messages_out_of_order_are_refused(messages: list[bytes]) -> None:
    one = assembly()
    with pytest.raises(BadMessage):
        feed(one, messages)
    one.close()


def test_rollback_of_an_unsent_transaction_is_ignored() -> None:
    assert feed(assembly(), [pg.stream_abort(7, 7), pg.stream_abort(8, 9, more=True)]) == []


def test_large_unfinished_transaction_is_kept_on_disk(tmp_path: Path) -> None:
    spill = FileSpill(tmp_path, in_memory=100)
    messages = [b"%d" % number * 10 for number in range(100)]
    for message in messages:
        spill.append(message)
    assert spill._file._rolled  # type: ignore[attr-defined]
    assert list(spill.read()) == messages
    assert spill.bytes == sum(map(len, messages)) + 400
    spill.drop()
    assert list(tmp_path.iterdir()) == []


def test_close_of_the_assembly_drops_unfinished_transactions() -> None:
    one = assembly()
    feed(one, [pg.stream_start(7), pg.insert(b"1", xid=7), pg.STREAM_STOP])
    assert one.is_idle  # it is not committed: confirmed or not, it comes again
    one.close()
    with pytest.raises(BadMessage, match="which was not sent"):
        feed(one, [pg.stream_commit(7, 10)])


def test_server_without_the_last_logged_transaction_is_refused() -> None:
    def messages_of(xid: int, lsn: int) -> list[bytes]:
        return [pg.begin(xid, lsn), pg.relation(NARROW), pg.insert(b"%d" % xid), pg.commit(lsn)]

    ours = LogEnd(30, proof="2")
    proven = assembly(ours)
    assert keys(feed(proven, messages_of(1, 10))) == [] and not proven.is_idle
    assert keys(feed(proven, messages_of(2, 20) + messages_of(3, 30))) == [3] and proven.is_idle
    for other in (
        messages_of(1, 10) + messages_of(3, 30),  # it is not there
        messages_of(3, 30),  # nor anything before it
        messages_of(7, 20),  # another one has its place
        messages_of(1, 10) + messages_of(2, 24),  # another one lies across it
        [pg.stream_start(9), pg.relation(NARROW, xid=9), b"E", pg.stream_commit(9, 40)],
    ):
        with pytest.raises(SourceMismatch, match="no transaction 2 that ends at 0/1E"):
            feed(assembly(ours), other)
