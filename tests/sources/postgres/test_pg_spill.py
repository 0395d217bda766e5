"""Messages that wait for their commit come out as they went in, wherever the edges of what is read at a time lie."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import StorageFull
from headwater.sources.postgres import spill
from headwater.sources.postgres.spill import FileSpill


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 50), st.sampled_from([1, 1 << 20]))
def test_any_sizes_at_any_edges(sizes: list[int], chunk: int, in_memory: int) -> None:
    messages = [bytes([place]) * size for place, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "CHUNK", chunk)
        kept = FileSpill(in_memory=in_memory)
        for message in messages:
            kept.append(message)
        assert list(kept.read()) == messages
        assert list(kept.read()) == messages  # and again
        assert kept.bytes == sum(sizes) + 4 * len(sizes)
        kept.drop()


def test_a_message_of_many_chunks_is_read_in_one_step() -> None:
    kept = FileSpill()
    large = b"x" * (5 * spill.CHUNK)
    for message in (b"a", large, b"b"):
        kept.append(message)
    assert list(kept.read()) == [b"a", large, b"b"]
    kept.drop()


def test_a_spill_that_cannot_be_written_does_not_tell_where(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    spill = FileSpill(gone, in_memory=10)
    with pytest.raises(StorageFull) as caught:
        spill.append(b"x" * 100)
    assert "cannot be kept" in caught.value.message and str(gone) not in caught.value.message
    spill.drop()
