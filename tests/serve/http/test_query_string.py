"""Query strings: the ticket, and limits on what the event loop parses."""

import pytest
from tests.serve.server_fixture import NoDatabases, serving

from headwater.config import Secret
from headwater.errors import InvalidRequest
from headwater.serve.http.handlers.pull_query_string import names_in
from headwater.serve.http.query_string import MAX_PARAMETERS, MAX_VALUES, changes_asked, ticket_in

TABLE = {"db": "main", "table": "item"}


@pytest.mark.parametrize(
    ("query", "ticket"),
    [
        (b"", None),
        (b"args=%5B1%5D", None),
        (b"ticket=a%2Bb", "a+b"),
        (b"x=%FF&%74%69%63%6B%65%74=a&ticket=b", "a"),
        (b"ticket", ""),
        (b"tickets=1&my_ticket=2&ticket=3", "3"),
        (b"%ticket=1", None),
    ],
)
def test_ticket_is_found_however_its_name_is_escaped(query: bytes, ticket: str | None) -> None:
    assert ticket_in(query) == ticket


def test_query_string_with_too_many_parameters_is_refused() -> None:
    assert ticket_in(b"ticket=1" + b"&%" * (MAX_PARAMETERS - 1)) == "1"
    with pytest.raises(InvalidRequest, match="more than 64 parameters"):
        ticket_in(b"ticket=1" + b"&%" * MAX_PARAMETERS)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/api/v1/q/none", "/nowhere"])
def test_many_parameters_are_refused_before_the_credential_is_checked(path: str) -> None:
    with serving(NoDatabases(), token=Secret("t" * 40)) as client:
        response = client.http.get(f"{path}?{'x=%41&' * MAX_PARAMETERS}")
        assert (response.status_code, response.json()["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("name", ["pk", "ops", "columns", "include", "spans"])
def test_list_with_too_many_values_is_refused(name: str) -> None:
    text = "[" + "1," * MAX_VALUES + "1]"
    with pytest.raises(InvalidRequest, match=f"{name} has more than {MAX_VALUES} values"):
        changes_asked(TABLE, {name: text})


def test_list_with_as_many_values_as_allowed_is_read() -> None:
    params, _ = changes_asked(TABLE, {"pk": f"[{','.join(['1'] * MAX_VALUES)}]"})
    assert params.pk is not None and len(params.pk) == MAX_VALUES


@pytest.mark.parametrize("text", ["a," * MAX_VALUES, '["a"' + ',"a"' * MAX_VALUES + "]"])
def test_pull_of_too_many_names_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="tables has more than"):
        names_in({"tables": text}, "tables")
