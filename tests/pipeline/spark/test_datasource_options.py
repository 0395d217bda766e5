"""Options: checked before anything is read."""

import pytest

from headwater.errors import ConfigError
from headwater.model.keys.key import Span
from headwater.pipeline.sinks.sink import Part
from headwater.pipeline.spark.options import LogPiece, options_of_table, parse

BASE = {"url": "http://127.0.0.1:7171", "table": "t"}


def parsed(**options: str):
    """Parse options as Spark passes them: keys in lower case."""
    return parse({key.lower(): value for key, value in {**BASE, **options}.items()})


def test_table_is_read_as_changes_only_with_a_starting_option() -> None:
    assert not parsed().is_log
    for option in ("startingOffset", "startingTimestamp", "after"):
        assert parsed(**{option: "5"}).is_log
    assert parsed(slices="[]").is_log


def test_option_values_are_parsed() -> None:
    found = parsed(columns="a, b", rowsPerPartition="7", schemaPolicy="PIN", version="g.1.12", db="default")
    assert (found.columns, found.rows_per_partition, found.policy) == (("a", "b"), 7, "pin")
    assert (found.generation, found.version, found.db) == ("g.1", 12, "main")
    assert (parsed().form, parsed(types="TEXT").form) == ("typed", "text")
    assert parse({"url": "http://h", "tables": "a,b"}).form == "text"
    assert parsed(columns='["a,b"]').columns == ("a,b",)
    assert parsed(version="12").generation is None
    assert parsed(parts='[["", "0a", 3]]').parts == (Part(Span(b"", b"\n"), 3),)
    assert parsed(slices='[["0a", null, 3, 9]]').slices == (LogPiece(3, 9, Span(b"\n")),)
    assert [parsed(startingOffset=text).starting_offset for text in ("Earliest", "latest", "5")] == [
        "earliest",
        "latest",
        5,
    ]


@pytest.mark.parametrize(
    "text", ["2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00", "1769860800000", "1769860800000.7"]
)
def test_starting_timestamp_is_parsed_in_every_accepted_notation(text: str) -> None:
    assert parsed(startingTimestamp=text).starting_ms == 1769860800000


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("after", "-1"),
        ("after", "x"),
        ("version", "g."),
        ("startingOffset", "soon"),
        ("startingTimestamp", "2026-01-31T12:00:00"),
        ("startingTimestamp", "yesterday"),
        ("schemaPolicy", "ignore"),
        ("types", "strings"),
        ("maxRowsPerTrigger", "0"),
        ("parts", "[[1]]"),
        ("ends", "yes"),
        ("slices", "{"),
        ("slices", "{}"),
        ("slices", '[["", null, 9, 3]]'),
        ("slices", '[["", null, -1, 3]]'),
        ("parts", "{}"),
        ("parts", '[["", null, -5]]'),
        ("parts", '[["", null, "-5"]]'),
        ("parts", '[["", null, 1.5]]'),
        ("parts", '[["", null]]'),
        ("tables", "a,*"),
        ("columns", ""),
        ("columns", "[1]"),
        ("shape", "0"),
        ("url", "ftp://host"),
    ],
)
def test_invalid_option_value_is_refused_with_the_option_name(option: str, text: str) -> None:
    with pytest.raises(ConfigError, match="not the URL" if option == "url" else f"option {option}: "):
        parsed(**{option: text})


def test_unknown_option_is_refused_with_the_nearest_option() -> None:
    with pytest.raises(ConfigError, match="unknown option 'startingoffsets'") as caught:
        parsed(startingOffsets="1")
    assert "startingoffset?" in caught.value.hint


def test_token_as_an_option_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(token="s3cret")
    assert "s3cret" not in str(caught.value) + caught.value.hint
    assert "token_file" in caught.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"tables": "a,b"},
        {"table": "t", "after": "1", "version": "2"},
        {"tables": "a,b", "where": "x > 1", "table": ""},
        {"table": "t", "upto": "2"},
        {"table": "t", "startingOffset": "1", "startingTimestamp": "2"},
        {"table": "t", "parts": "[]", "slices": "[]"},
        {"table": "t", "ends": "true"},
        {"table": "t", "after": "5", "startingOffset": "1"},
        {"table": "t", "after": "5", "startingTimestamp": "1"},
        {"table": "t", "version": "9", "maxRowsPerTrigger": "5"},
    ],
)
def test_conflicting_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        parsed(**options)


def test_options_without_url_or_table_are_refused() -> None:
    with pytest.raises(ConfigError, match="url"):
        parse({"table": "t"})
    with pytest.raises(ConfigError, match="table"):
        parse({"url": "http://h"})
    assert parse({"url": "http://h", "tables": "*"}).named_tables == ()


def test_options_of_a_table_in_the_catalog_are_separated_from_its_properties() -> None:
    assert options_of_table(BASE) is None
    given = {"provider": "headwater", "owner": "me", "path": "/x", "serialization.format": "1", "comment": "orders"}
    assert options_of_table(given) == {}
    marked = {f"option.{name}": text for name, text in BASE.items()}
    assert options_of_table(given | BASE | marked) == BASE
