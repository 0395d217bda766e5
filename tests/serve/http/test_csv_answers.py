"""Answers as CSV: the same bytes under every Python."""

import csv
import io
from typing import Any

import pytest

from headwater.serve.rpc.body_pieces import csv_pieces
from headwater.sources.query import ReadResult


def test_null_is_empty_and_an_empty_text_is_quoted() -> None:
    rows: list[tuple[Any, ...]] = [(None, ""), ("", None), (1, 2.5), ("a,b", 'say "x"'), ("l\nm", "r\rs"), (b"\0", " ")]
    assert csv_pieces(ReadResult(("a", ""), rows, 1)).joined() == (
        b'a,""\r\n,""\r\n"",\r\n1,2.5\r\n"a,b","say ""x"""\r\n"l\nm","r\rs"\r\nAA==, \r\n'
    )


def test_row_of_one_null_is_an_empty_csv_line() -> None:
    assert csv_pieces(ReadResult(("a",), [(None,), ("",)], 1)).joined() == b'a\r\n\r\n""\r\n'


@pytest.mark.parametrize("text", ["", "a", '"', '""', ",", "\r\n", "\n", "é😀", " x ", "'", "=1+1", "\ufeff", "\0"])
def test_text_with_any_csv_character_is_read_back(text: str) -> None:
    written = csv_pieces(ReadResult(("a", "b"), [(text, text + "x")], 1)).joined().decode()
    assert list(csv.reader(io.StringIO(written, newline="")))[1] == [text, text + "x"]
