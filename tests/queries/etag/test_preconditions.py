"""If-Match and If-None-Match: parsing, and every verdict of RFC 9110 §13.2.2."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequest
from headwater.queries.etag.preconditions import MAX_TAGS, Conditions, Outcome, Tag, Tags, Verdict

GO_ON, FAILED = Outcome(Verdict.GO_ON), Outcome(Verdict.FAILED)
ETAGC = st.text(
    st.characters(codec="latin-1", exclude_characters='" \x7f', min_codepoint=0x21).filter(
        lambda char: not "\x7f" <= char < "\x80"
    )
)
TAGS = st.builds(Tag, ETAGC, st.booleans())


def same(tag: str | None) -> Outcome:
    return Outcome(Verdict.NOT_MODIFIED, tag)


# --- reading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "tags"),
    [
        ('"a"', [Tag("a")]),
        (b'"a"', [Tag("a")]),
        ('W/"a"', [Tag("a", True)]),
        ('"a", W/"b" ,"c"', [Tag("a"), Tag("b", True), Tag("c")]),
        ('"a","b"', [Tag("a"), Tag("b")]),
        (' \t"a"\t ', [Tag("a")]),
        (',, "a" ,\t, "b",', [Tag("a"), Tag("b")]),  # empty elements are allowed (RFC 9110 §5.6.1.2)
        ('""', [Tag("")]),
        ('"a,b", "*"', [Tag("a,b"), Tag("*")]),
        ('"W/"', [Tag("W/")]),
        (b'"\xe9"', [Tag("\xe9")]),
        ("", []),
        (" , ", []),
    ],
)
def test_etag_lists_are_parsed_by_the_grammar_of_rfc_9110(header: str | bytes, tags: list[Tag]) -> None:
    found = Tags.parse(header)
    assert found is not None and not found.any
    assert list(found.tags) == tags
    assert found.opaque == [tag.opaque for tag in tags]


@pytest.mark.parametrize("header", ["*", " * ", b"*", "\t*"])
def test_etag_header_with_a_lone_star_matches_any_etag(header: str | bytes) -> None:
    assert Tags.parse(header) == Tags(any=True)


@pytest.mark.parametrize(
    "header",
    ["a", '"a', 'a"', "'a'", '"a" "b"', '"a""b"', '"a"W/"b"', 'w/"a"', 'W /"a"', '*, "a"', '"a", *', "*,*", "**"]
    + ['"a b"', '"a\x00"', '"a\x7f"', '"a"; x', "W/", "W/*", '"', '"a", b', '"\\"a"'],
)
def test_malformed_etag_list_is_parsed_to_none(header: str) -> None:
    assert Tags.parse(header) is None


@pytest.mark.slow
@given(st.lists(TAGS), st.sampled_from([",", ", ", " ,\t", ",,"]))
def test_written_etag_list_parses_back(tags: list[Tag], comma: str) -> None:
    assert Tags.parse(comma.join(map(str, tags))) == Tags(tags=tuple(tags))


@given(st.text(alphabet='"W/, \ta*\\\x7f', max_size=12))
def test_random_text_is_parsed_as_etags_or_refused(text: str) -> None:
    found = Tags.parse(text)
    assert found is None or found.any or Tags.parse(", ".join(map(str, found.tags))) == found


def test_long_etag_list_is_parsed_and_a_long_malformed_one_is_rejected() -> None:
    found = Tags.parse('"a"' + "," * 30_000 + '"b"' + ' "c"')
    assert found is None
    assert Tags.parse(",".join(['"x"'] * MAX_TAGS)) == Tags(tags=(Tag("x"),) * MAX_TAGS)


def test_etag_list_with_too_many_tags_is_ignored_on_a_read_and_refused_on_a_write() -> None:
    header = b",".join([b'"x"'] * (MAX_TAGS + 1))
    assert Conditions.of("GET", [(b"if-none-match", header)]).if_none_match is None
    for method, name in (("GET", b"if-match"), ("PUT", b"if-match"), ("PUT", b"if-none-match")):
        with pytest.raises(InvalidRequest, match="more than 256 tags"):
            Conditions.of(method, [(name, header)])


# --- comparing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "tag", "strong", "weak"),  # the table of RFC 9110 §8.8.3.2
    [
        ('W/"1"', 'W/"1"', False, True),
        ('W/"1"', 'W/"2"', False, False),
        ('W/"1"', '"1"', False, True),
        ('"1"', 'W/"1"', False, True),
        ('"1"', '"1"', True, True),
        ('"1"', '"2"', False, False),
        ('"1-gzip"', '"1"', False, True),
        ('W/"1-gzip"', '"1"', False, True),
        ('"1-br"', '"1"', False, True),
        ('"1"', '"1-gzip"', False, False),
        ('"1-gzip-gzip"', '"1"', False, False),
        ("*", '"1"', False, False),
    ],
)
def test_strong_and_weak_etag_comparison_follows_rfc_9110(listed: str, tag: str, strong: bool, weak: bool) -> None:
    tags = Tags.parse(listed)
    assert tags is not None
    assert (tags.matches_strong(tag), tags.weakly(tag) is not None) == (strong, weak)


# --- deciding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "etag", "if_match", "if_none_match", "outcome"),
    [
        ("GET", '"a"', None, None, GO_ON),
        ("GET", '"a"', None, '"a"', same('"a"')),
        ("HEAD", '"a"', None, '"b", "a"', same('"a"')),
        ("GET", '"a"', None, 'W/"a"', same('W/"a"')),  # the client's own tag comes back
        ("GET", '"a"', None, '"a-gzip"', same('"a-gzip"')),
        ("GET", '"a"', None, "*", same('"a"')),
        ("GET", '"a"', None, '"b"', GO_ON),
        ("GET", '"a"', None, "", GO_ON),
        ("GET", None, None, "*", GO_ON),
        ("GET", '"a"', '"a"', None, GO_ON),
        ("GET", '"a"', '"b"', None, FAILED),
        ("GET", '"a"', '"b"', '"a"', FAILED),  # If-Match comes first
        ("GET", '"a"', '"a"', '"a"', same('"a"')),
        ("PUT", '"a"', None, None, GO_ON),
        ("PUT", None, None, "*", GO_ON),
        ("PUT", '"a"', None, "*", FAILED),
        ("PUT", '"a"', None, '"a"', FAILED),
        ("PUT", '"a"', None, 'W/"a"', FAILED),
        ("PUT", '"a"', None, '"b"', GO_ON),
        ("PUT", '"a"', "*", None, GO_ON),
        ("PUT", None, "*", None, FAILED),
        ("PUT", None, '"a"', None, FAILED),
        ("PUT", '"a"', '"b", "a"', None, GO_ON),
        ("PUT", '"a"', 'W/"a"', None, FAILED),
        ("PUT", '"a"', '"a-gzip"', None, FAILED),
        ("PUT", '"a"', "", None, FAILED),
        ("PUT", '"a"', '"a"', '"a"', FAILED),
        ("PATCH", '"a"', '"a"', '"b"', GO_ON),
        ("DELETE", '"a"', '"b"', None, FAILED),
        ("DELETE", '"a"', "*", None, GO_ON),
    ],
)
def test_method_etag_and_conditions_give_the_verdict_of_rfc_9110(
    method: str, etag: str | None, if_match: str | None, if_none_match: str | None, outcome: Outcome
) -> None:
    one, two = (None if text is None else Tags.parse(text) for text in (if_match, if_none_match))
    assert Conditions(one, two).decide(method, etag) == outcome


def test_etags_of_other_row_forms_count_for_a_write_and_not_for_a_304() -> None:
    lits = Tags.parse('"a.lits"')
    assert Conditions(lits, None).decide("PUT", '"a"', also=('"a.lits"',)) == GO_ON
    assert Conditions(None, lits).decide("PUT", '"a"', also=('"a.lits"',)) == FAILED
    assert Conditions(None, lits).decide("GET", '"a"', also=('"a.lits"',)) == GO_ON


def test_if_none_match_never_fails_a_read_and_never_makes_a_write_not_modified() -> None:
    texts = (None, "", "*", '"a"', 'W/"a"', '"b"', '"b", "a"')
    for method, etag, text in itertools.product(("GET", "HEAD", "PUT", "PATCH", "DELETE"), ('"a"', None), texts):
        tags = None if text is None else Tags.parse(text)
        verdict = Conditions(None, tags).decide(method, etag).verdict
        assert verdict != (Verdict.FAILED if method in ("GET", "HEAD") else Verdict.NOT_MODIFIED)


# --- the headers of a request ----------------------------------------------------------------------------


def test_repeated_header_lines_are_joined_to_one_list() -> None:
    lines = [(b"if-match", b'"a"'), (b"host", b"x"), (b"if-match", b'"b"'), (b"if-none-match", b"*")]
    assert Conditions.of("PUT", lines) == Conditions(Tags(tags=(Tag("a"), Tag("b"))), Tags(any=True))


def test_request_without_preconditions_is_executed() -> None:
    assert Conditions.of("PUT", [(b"host", b"x")]) == Conditions()
    assert Conditions().decide("DELETE", None) == GO_ON


@pytest.mark.parametrize(
    ("method", "name"),
    [("PUT", b"if-match"), ("PUT", b"if-none-match"), ("DELETE", b"if-none-match"), ("GET", b"if-match")],
)
@pytest.mark.parametrize("value", [b"row:abc", b'*, "a"', b'"a'])
def test_malformed_condition_is_rejected(method: str, name: bytes, value: bytes) -> None:
    with pytest.raises(InvalidRequest) as found:
        Conditions.of(method, [(name, value)])
    assert name.decode() in found.value.message and found.value.hint


def test_malformed_if_none_match_on_a_read_is_ignored() -> None:
    for value in (b"row:abc", b'*, "a"', b'"a'):
        assert Conditions.of("GET", [(b"if-none-match", value)]).decide("GET", '"a"') == GO_ON
