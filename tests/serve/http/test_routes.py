"""Paths to routes: names come out as they were put in, whatever they hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.feeds.deliver.consumer import snapshot_url
from headwater.serve.http.routes import MAX_KEY, find, key_parts

names = st.binary(min_size=1).map(lambda raw: raw.decode("utf-8", "surrogateescape"))


@given(names)
def test_snapshot_url_is_parsed_to_its_database_and_table(name: str) -> None:
    path = snapshot_url("main", name, "g.1").partition("?")[0]
    route, values = find("/decoded", path.encode("ascii"))
    assert route is not None and route.handler == "snapshot"
    assert values == {"db": "main", "table": name}


@pytest.mark.parametrize(("method", "handler"), [("GET", "get_row"), ("DELETE", "delete_row"), ("POST", "get_row")])
def test_route_of_the_method_or_else_the_first_of_the_path_is_found(method: str, handler: str) -> None:
    route, values = find("/decoded", b"/api/v1/t/main/item/a%2Fb", method)
    assert route is not None and route.handler == handler
    assert values == {"db": "main", "table": "item", "key": "a/b"}


def test_key_values_beyond_the_limit_are_not_decoded() -> None:
    assert key_parts(b"/t/%41,b%2Cc") == ("A", "b,c")
    assert len(key_parts(b"/t/" + b"%41," * MAX_KEY)) == MAX_KEY + 1
    assert len(key_parts(b"/t/" + b"%41," * 20 * MAX_KEY)) == MAX_KEY + 1
