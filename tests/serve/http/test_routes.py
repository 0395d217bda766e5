"""Paths to routes: names come out as they were put in, whatever they hold."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.feeds.deliver.consumer import snapshot_url
from headwater.serve.http.routes import find

names = st.binary(min_size=1).map(lambda raw: raw.decode("utf-8", "surrogateescape"))


@given(names)
def test_snapshot_url_is_parsed_to_its_database_and_table(name: str) -> None:
    path = snapshot_url("main", name, "g.1").partition("?")[0]
    route, values = find("/decoded", path.encode("ascii"))
    assert route is not None and route.handler == "snapshot"
    assert values == {"db": "main", "table": name}
