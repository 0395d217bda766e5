"""Accept by its weights, for every route that offers more than one format."""

import pytest

from headwater.serve.call import MAX_ITEMS, list_header, wanted_kind

JSON, CSV, ARROW = b"application/json", b"text/csv", b"application/vnd.apache.arrow.stream"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("text/csv", CSV),
        ("TEXT/CSV ; q=0.3", CSV),
        ("text/csv, application/json;q=0.1", CSV),
        ("application/json;q=0.1, text/csv", CSV),
        ("text/csv;q=0.5, application/json", JSON),
        ("text/csv, application/json", JSON),
        ("text/csv, */*", CSV),
        ("text/csv;q=0.9, */*", JSON),
        ("text/*", CSV),
        ("text/*;q=0.2, application/vnd.apache.arrow.stream;q=0.3", ARROW),
        ("text/csv;q=0, text/*", JSON),
        ("application/json;q=0, */*", CSV),
        ("application/*;q=0.1, */*", CSV),
        ("text/csv;header=present", CSV),
        ("text/csv;q=0.1, text/csv", CSV),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", JSON),
        ("text/html", JSON),
        ("application/json;q=0", CSV),
        ("*/*;q=0", JSON),
        ("text/csv;q=nan, application/json;q=0.9", CSV),
        ("text/csv;q=-1", CSV),
        (",;q=,,", JSON),
    ],
)
def test_accept_header_selects_the_response_format(accept: str, kind: bytes) -> None:
    assert wanted_kind(accept.encode(), (JSON, CSV, ARROW)) == kind


def test_list_header_with_too_many_items_is_ignored() -> None:
    def accept(*values: bytes) -> bytes:
        return list_header([(b"accept", value) for value in values] + [(b"x", b"text/html")], b"accept")

    assert accept(b"text/csv", b"text/html;q=0.1") == b"text/csv,text/html;q=0.1"
    longest = b"text/csv" + b",;" * (MAX_ITEMS // 2)
    assert wanted_kind(accept(longest), (JSON, CSV)) == CSV
    assert accept(longest, b"a") == accept(longest + b";") == b""
