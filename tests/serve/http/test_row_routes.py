"""Rows at their own addresses: statuses, headers, forms of keys and values, refusals; by a real server."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tests.queries.open_databases import Files, dump
from tests.serve.server_fixture import Client, NoDatabases, serving
from tests.suite.deadlines import PATIENCE

from headwater.config import Secret
from headwater.model.change import Op
from headwater.model.principal import Principal
from headwater.queries.etag.causality import from_header, to_header, token
from headwater.serve.call import wanted_kind
from headwater.serve.rpc.results import OBJECTS

DDL = (
    "CREATE TABLE users (id INTEGER PRIMARY KEY, email TEXT NOT NULL UNIQUE, age INTEGER DEFAULT 7, extra JSON)",
    "CREATE TABLE pairs (a TEXT, b INTEGER, v BLOB, PRIMARY KEY (a, b)) WITHOUT ROWID",
    "CREATE TABLE blobs (k BLOB PRIMARY KEY, n REAL)",
    "CREATE TABLE words (w TEXT COLLATE NOCASE PRIMARY KEY, n INTEGER)",
    "CREATE TABLE loose (k PRIMARY KEY, v)",
    "CREATE TABLE money (k DECIMAL(9, 2) PRIMARY KEY, v)",
    "CREATE TABLE days (d DATE_TEXT, u UUID_TEXT, f REAL, o BOOLEAN, PRIMARY KEY (d, u, f, o))",
    "CREATE TABLE keyless (v)",
    "CREATE TABLE made (id INTEGER PRIMARY KEY, n INTEGER, twice INTEGER AS (n * 2) STORED, once INTEGER AS (n))",
    "CREATE TABLE kinds (id INTEGER PRIMARY KEY, u UNSIGNED BIG INT, d DECIMAL_TEXT, r REAL, j JSON, b BLOB, o BOOL,"
    " t TIMESTAMP, e EMBEDDING_BLOB, x)",
    "CREATE TABLE parents (id INTEGER PRIMARY KEY, n)",
    "CREATE TABLE children (id INTEGER PRIMARY KEY, p INTEGER REFERENCES parents ON DELETE CASCADE)",
    'CREATE TABLE "odd/name, 100%" (k TEXT PRIMARY KEY, "a b" TEXT)',
    "CREATE TABLE kept (id INTEGER PRIMARY KEY, n)",
    "CREATE TRIGGER kept_n BEFORE UPDATE ON kept BEGIN SELECT RAISE(IGNORE); END",
    "CREATE TRIGGER kept_d BEFORE DELETE ON kept BEGIN SELECT RAISE(IGNORE); END",
    "CREATE TRIGGER kept_i BEFORE INSERT ON kept WHEN NEW.id > 1 BEGIN SELECT RAISE(IGNORE); END",
    "CREATE TABLE stamped (id INTEGER PRIMARY KEY, n, at)",
    "CREATE TRIGGER stamp AFTER INSERT ON stamped BEGIN UPDATE stamped SET at = 'now' WHERE id = NEW.id; END",
)
PROBLEM = "application/problem+json"


class Rows:
    """Sends requests to the row routes."""

    def __init__(self, client: Client, files: Files) -> None:
        self.client, self.files, self.http = client, files, client.http

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        if body is not None:
            named.setdefault("content-type", "application/json")
        url = path if path.startswith("/api") else f"/api/v1/t/main/{path}"
        return self.http.request(method, url, content=content, headers=named)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.ask("GET", path, **headers)

    def put(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.ask("PUT", path, body, **headers)

    def patch(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.ask("PATCH", path, body, **headers)

    def delete(self, path: str, **headers: str) -> httpx.Response:
        return self.ask("DELETE", path, **headers)

    def refused(self, response: httpx.Response, status: int, code: str) -> dict[str, Any]:
        """Return the problem of a refused request, after checking its form."""
        assert (response.status_code, response.headers["content-type"]) == (status, PROBLEM), response.text
        found: dict[str, Any] = response.json()
        assert (found["status"], found["code"]) == (status, code)
        return found


@pytest.fixture(scope="module")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rows]:
    with Files(Path(tmp_path_factory.mktemp("rows"))) as files:
        for sql in DDL:
            files.run(sql)
        with serving(files, max_body_bytes=100_000) as client:
            yield Rows(client, files)


@pytest.fixture
def rows(_world: Rows) -> Rows:
    for table in ("users", "pairs", "blobs", "words", "loose", "money", "days", "made", "kinds", "children", "stamped"):
        _world.files.run(f"DELETE FROM {table}")
    return _world


# --- the four methods ------------------------------------------------------------------------------------


def test_put_get_patch_and_delete_of_a_row_return_its_values_statuses_and_etags(rows: Rows) -> None:
    made = rows.put("users/1", {"email": "a@x", "age": 30})
    assert (made.status_code, made.headers["location"]) == (201, "/api/v1/t/main/users/1")
    assert made.json() == {"id": 1, "email": "a@x", "age": 30, "extra": None}
    got = rows.get("users/1")
    assert (got.status_code, got.headers["content-type"]) == (200, "application/json")
    assert got.content == made.content and got.headers["etag"] == made.headers["etag"]
    replaced = rows.put("users/1", {"id": 1, "email": "b@x"})
    assert replaced.status_code == 200 and "location" not in replaced.headers
    assert replaced.json() == {"id": 1, "email": "b@x", "age": None, "extra": None}
    changed = rows.patch("users/1", {"extra": {"a": [1, None]}})
    assert changed.status_code == 200
    assert changed.json() == {"id": 1, "email": "b@x", "age": None, "extra": {"a": [1, None]}}
    tags = [response.headers["etag"] for response in (made, replaced, changed)]
    assert len(set(tags)) == 3 and all(tag.startswith('"row:') for tag in tags)
    gone = rows.delete("users/1")
    assert (gone.status_code, gone.content) == (204, b"") and "etag" not in gone.headers
    rows.refused(rows.get("users/1"), 404, "not_found")


def test_every_row_write_returns_its_causality_token_and_row_tag(rows: Rows) -> None:
    before = rows.files.get("main").head()
    answers = [
        rows.put("users/1", {"email": "a"}),
        rows.put("users/1", {"email": "b"}),
        rows.patch("users/1", {"age": 1}),
        rows.delete("users/1"),
    ]
    for place, response in enumerate(answers, before + 1):
        found = from_header(response.headers["x-headwater-causality"])
        assert [(dep.table, dep.v) for dep in found.deps] == [("main.users", place)]
        assert response.headers["cache-control"] == "no-store"
    for response in answers[:3]:
        assert response.headers["content-location"] == "/api/v1/t/main/users/1"


def test_row_route_etag_equals_the_etag_of_data_get(rows: Rows) -> None:
    tag = rows.put("users/1", {"email": "a"}).headers["etag"]
    found = rows.client.ok("data.get", table={"table": "users"}, pk=[1])
    assert found["etag"] == tag == rows.get("/api/v1/t/default/users/1").headers["etag"]


def test_column_omitted_in_a_put_is_null(rows: Rows) -> None:
    first = rows.put("users/1", {"email": "a"})
    assert first.json()["age"] is None, "not its default: the same PUT twice gives the same row"
    assert rows.put("users/1", {"email": "a"}).headers["etag"] == first.headers["etag"]
    problem = rows.refused(rows.put("users/2", {"age": 1}), 400, "invalid_request")
    assert "'email'" in problem["title"] and "PATCH" in problem["hint"]


def test_head_returns_the_headers_of_get(rows: Rows) -> None:
    rows.put("users/1", {"email": "a"})
    got, head = rows.get("users/1"), rows.ask("HEAD", "users/1")
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "content-type", "cache-control", "vary"):
        assert head.headers[name] == got.headers[name]
    assert rows.ask("HEAD", "users/1", if_none_match=got.headers["etag"]).status_code == 304
    assert rows.ask("HEAD", "users/9").status_code == 404
    assert "id" in rows.refused(rows.get("users/9"), 404, "not_found")["hint"]


def test_get_patch_or_delete_of_a_missing_row_gets_404_whatever_the_preconditions(rows: Rows) -> None:
    for headers in ({}, {"if_match": "*"}, {"if_match": '"x"'}, {"if_none_match": "*"}):
        rows.refused(rows.patch("users/1", {"age": 1}, **headers), 404, "not_found")
        rows.refused(rows.delete("users/1", **headers), 404, "not_found")
        rows.refused(rows.get("users/1", **headers), 404, "not_found")


def test_put_on_a_parent_row_does_not_cascade_to_its_children(rows: Rows) -> None:
    rows.put("parents/1", {"n": 1})
    rows.put("children/1", {"p": 1})
    rows.put("parents/1", {"n": 2})
    assert rows.get("children/1").json() == {"id": 1, "p": 1}, "not deleted and inserted again: that would cascade"


def test_put_on_an_existing_row_logs_one_update(rows: Rows) -> None:
    rows.put("users/1", {"email": "a"})
    before = rows.files.get("main").head()
    rows.put("users/1", {"email": "b"})
    (transaction,) = rows.files.get("main").follow(after=before)
    assert [change.op for change in transaction.changes] == [Op.UPDATE]


# --- conditions ------------------------------------------------------------------------------------------


def test_not_modified_row_has_the_cache_headers_of_the_200_and_the_client_etag(rows: Rows) -> None:
    tag = rows.put("users/1", {"email": "a"}).headers["etag"]
    whole = rows.get("users/1")
    bare = tag.strip('"')
    for given in (tag, f"W/{tag}", f'"x", {tag}', f'"{bare}-gzip"', f'W/"{bare}-gzip"', "*"):
        same = rows.get("users/1", if_none_match=given)
        assert (same.status_code, same.content) == (304, b""), given
        for name in ("cache-control", "vary"):
            assert same.headers[name] == whole.headers[name]
        assert same.headers["etag"] == (tag if given == "*" else given.removeprefix('"x", '))
        assert "content-type" not in same.headers and "content-length" not in same.headers
    assert whole.headers["cache-control"] == "private, no-cache" and whole.headers["vary"] == "Accept"
    for given in ('"x"', bare, "", f"*, {tag}", f'"{bare}'):
        again = rows.get("users/1", if_none_match=given)
        assert (again.status_code, again.content) == (200, whole.content), given


def test_row_write_with_a_stale_if_match_gets_412_and_changes_nothing(rows: Rows) -> None:
    old = rows.put("users/1", {"email": "a"}).headers["etag"]
    new = rows.put("users/1", {"email": "b"}).headers["etag"]
    before = dump(rows.files.path("main"))
    for given in (old, '"x"', f"W/{new}", "", f'"{new[1:-1]}-gzip"'):
        for response in (
            rows.put("users/1", {"email": "c"}, if_match=given),
            rows.patch("users/1", {"email": "c"}, if_match=given),
            rows.delete("users/1", if_match=given),
        ):
            assert rows.refused(response, 412, "precondition_failed")["hint"]
    assert dump(rows.files.path("main")) == before
    rows.refused(rows.get("users/1", if_match=old), 412, "precondition_failed")
    assert rows.get("users/1", if_match=new).status_code == 200
    assert rows.patch("users/1", {"age": 2}, if_match=f"{old}, {new}").status_code == 200
    assert rows.delete("users/1", if_match="*").status_code == 204


def test_put_with_if_none_match_star_only_creates_and_with_if_match_star_only_replaces(rows: Rows) -> None:
    rows.refused(rows.put("users/1", {"email": "a"}, if_match="*"), 412, "precondition_failed")
    assert rows.put("users/1", {"email": "a"}, if_none_match="*").status_code == 201
    rows.refused(rows.put("users/1", {"email": "b"}, if_none_match="*"), 412, "precondition_failed")
    assert rows.put("users/1", {"email": "c"}, if_match="*").status_code == 200
    tag = rows.get("users/1").headers["etag"]
    for given in (tag, f"W/{tag}"):
        rows.refused(rows.put("users/1", {"email": "d"}, if_none_match=given), 412, "precondition_failed")
    assert rows.put("users/1", {"email": "d"}, if_none_match='"x"').status_code == 200
    assert rows.get("users/1").json()["email"] == "d"


def test_invalid_conditions_of_row_writes_are_refused(rows: Rows) -> None:
    rows.put("users/1", {"email": "a"})
    for name in ("if_match", "if_none_match"):
        for given in ("row:x", '"x', '*, "x"'):
            rows.refused(rows.put("users/1", {"email": "b"}, **{name: given}), 400, "invalid_request")
            rows.refused(rows.delete("users/1", **{name: given}), 400, "invalid_request")
    assert rows.get("users/1").json()["email"] == "a"


def raw(client: Client, text: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send `text` as it is and read one answer to the end of the connection."""
    with socket.create_connection(client.server.addresses[0], timeout=PATIENCE) as sock:
        sock.sendall(text)
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    return int(first.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}, body


def request(method: str, path: bytes, *lines: bytes, body: bytes = b"") -> bytes:
    head = [b"%s %s HTTP/1.1" % (method.encode(), path), b"host: localhost", b"connection: close", *lines]
    if body:
        head += [b"content-type: application/json", b"content-length: %d" % len(body)]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def test_unusual_condition_headers_of_a_row_are_parsed_as_rfc_9110_says(rows: Rows) -> None:
    tag = rows.put("users/1", {"email": "a"}).headers["etag"].encode()
    path = b"/api/v1/t/main/users/1"

    def status(method: str, *lines: bytes) -> int:
        return raw(rows.client, request(method, path, *lines, body=b'{"age": 1}' if method == "PATCH" else b""))[0]

    assert status("GET", b'IF-NONE-MATCH: "x"', b"If-None-Match:" + tag) == 304
    assert status("GET", b"if-none-match:\t " + tag + b" \t,,") == 304
    assert status("GET", b"if-none-match: *", b"if-none-match: *") == 200
    assert status("GET", b'if-none-match: "\xff", ' + tag) == 304
    assert status("GET", b"if-none-match: \xff") == 200
    assert status("GET", b"if-none-match: " + b'"x",' * 255 + tag) == 304
    assert status("GET", b"if-none-match: " + b'"x",' * 10_000 + tag) == 200
    assert status("PATCH", b'if-match: "x"', b"if-match: " + tag) == 200
    assert status("PATCH", b"if-match: " + tag) == 412
    assert status("PATCH", b"if-match: *", b"if-match: *") == 400
    assert status("PATCH", b"if-match: \xff") == 400
    assert status("PATCH", b'if-match: "\xff"') == 412
    assert status("DELETE", b"if-none-match: *") == 412
    assert status("PATCH", b"if-unmodified-since: Sat, 29 Oct 1994 19:43:31 GMT") == 200, "there is no date to compare"
    assert status("GET", b"if-modified-since: Sat, 29 Oct 2094 19:43:31 GMT") == 200
    assert status("GET", b"range: bytes=0-1", b'if-range: "x"') == 200


def test_head_request_and_304_of_a_row_have_no_body_on_the_wire(rows: Rows) -> None:
    rows.put("users/1", {"email": "a"})
    status, headers, body = raw(rows.client, request("HEAD", b"/api/v1/t/main/users/1"))
    assert (status, body) == (200, b"") and int(headers["content-length"]) > 0
    status, headers, body = raw(rows.client, request("GET", b"/api/v1/t/main/users/1", b"if-none-match: *"))
    assert (status, body) == (304, b"")


# --- keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("pairs/x,1", {"a": "x", "b": 1}),
        ("pairs/x%2Cy,1", {"a": "x,y", "b": 1}),
        ("pairs/,1", {"a": "", "b": 1}),
        ("pairs/a%2Fb%20%25,-3", {"a": "a/b %", "b": -3}),
        ("pairs/%C3%A9+,0", {"a": "é+", "b": 0}),
        ("pairs/~str:~x,1", {"a": "~x", "b": 1}),
        ("pairs/%7Estr:a:b,1", {"a": "a:b", "b": 1}),
        ("pairs/..,1", {"a": "..", "b": 1}),
        ("words/~str:", {"w": ""}),
        ("blobs/00ff", {"k": "AP8="}),
        ("blobs/~bytes:", {"k": ""}),
        ("loose/5", {"k": "5"}),
        ("loose/~i64:5", {"k": 5}),
        ("loose/~f64:0.5", {"k": 0.5}),
        ("loose/~bytes:00", {"k": "AA=="}),
        ("money/5.50", {"k": 5.5}),
        ("users/-9223372036854775808", {"id": "-9223372036854775808"}),
        ("users/9007199254740993", {"id": "9007199254740993"}),
        ("odd%2Fname%2C%20100%25/k", {"k": "k"}),
    ],
)
def test_row_keys_in_every_url_form_address_their_row(rows: Rows, path: str, key: dict[str, Any]) -> None:
    body = {"email": "a"} if path.startswith("users") else {}
    made = rows.put(path, body)
    assert made.status_code == 201, made.text
    assert key.items() <= made.json().items()
    assert made.headers["location"] == f"/api/v1/t/main/{path}"
    again = rows.get(made.headers["location"])
    assert again.content == made.content
    lits = rows.get(path, accept=OBJECTS).json()
    assert rows.put(path, lits, content_type=OBJECTS).status_code == 200, "what a GET gave can be sent back"
    assert rows.delete(path).status_code == 204
    assert rows.get(path).status_code == 404


def test_composite_key_of_four_kinds_addresses_its_row(rows: Rows) -> None:
    path = "days/2026-01-18,550e8400-e29b-41d4-a716-446655440000,1.5,true"
    assert rows.put(path, {}).status_code == 201
    assert rows.get(path).json() == {
        "d": "2026-01-18",
        "u": "550e8400-e29b-41d4-a716-446655440000",
        "f": 1.5,
        "o": True,
    }
    assert rows.delete(path).status_code == 204


def test_percent_encoded_slash_or_comma_in_a_key_value_is_not_a_separator() -> None:
    from headwater.serve.http.routes import find, key_parts

    random = Random(5)
    for _ in range(500):
        parts = tuple("".join(random.choices("ab,/%~é\udcff ", k=random.randrange(4))) for _ in range(3))
        written = ",".join(quote(part, safe="", errors="surrogateescape") for part in parts)
        path = f"/api/v1/t/main/x/{written}".encode()
        assert key_parts(path) == parts, parts
        assert find("", path, "PATCH")[1]["table"] == "x"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("users/abc", "i64"),
        ("users/1.5", "i64"),
        ("users/%20 1", "i64"),
        ("users/9223372036854775808", "i64"),
        ("users/" + "9" * 5000, "i64"),
        ("users/%D9%A1", "i64"),  # a digit, but none of ours
        ("users/1,2", "1 values, 2 were given"),
        ("pairs/x", "2 values, 1 were given"),
        ("pairs/x,y", "i64"),
        ("pairs/%FF,1", "str"),
        ("blobs/AP8=", "bytes"),
        ("blobs/0", "bytes"),
        ("pairs/~x,1", "cannot be read"),
        ("pairs/~null,1", "NULL"),
        ("pairs/~null:,1", "NULL"),
        ("pairs/~i64:1,1", "does not fit"),
        ("pairs/~nope:1,1", "cannot be read"),
        ("loose/~embedding:1", "embedding"),
        ("loose/~json:{", "json"),
        ("days/2026-1-18,550e8400-e29b-41d4-a716-446655440000,1.5,true", "date"),
        ("days/2026-01-18,x,1.5,true", "uuid"),
        ("days/2026-01-18,550e8400-e29b-41d4-a716-446655440000,nan,true", "f64"),
        ("days/2026-01-18,550e8400-e29b-41d4-a716-446655440000,1.5,1", "bool"),
        ("keyless/1", "no primary key"),
    ],
)
def test_invalid_row_keys_are_refused_by_every_method(rows: Rows, path: str, said: str) -> None:
    for response in (rows.get(path), rows.put(path, {}), rows.patch(path, {"v": 1}), rows.delete(path)):
        problem = rows.refused(response, 400, "invalid_request")
        assert said in problem["title"] and problem["hint"], problem


def test_row_url_without_a_key_returns_404(rows: Rows) -> None:
    for path in ("users", "users/", "users/1/", "users/1/2", "/api/v1/t/main//1"):
        rows.refused(rows.get(path), 404, "not_found")


def test_row_body_with_a_key_other_than_in_the_url_gets_400(rows: Rows) -> None:
    rows.put("users/1", {"email": "a"})
    for body in ({"id": 2, "email": "b"}, {"id": None, "email": "b"}):
        assert "'id'" in rows.refused(rows.put("users/1", body), 400, "invalid_request")["title"]
        rows.refused(rows.patch("users/1", body), 400, "invalid_request")
        rows.refused(rows.put("users/3", body), 400, "invalid_request")
    rows.refused(rows.put("users/1", {"id": "x", "email": "b"}), 400, "invalid_request")
    assert rows.patch("users/1", {"id": 1, "age": 4}).json()["age"] == 4
    assert rows.patch("users/1", {"id": 1}).status_code == 200
    assert rows.client.rows("SELECT count(*) FROM users") == [[1]]


def test_keys_are_compared_as_the_database_compares_them(rows: Rows) -> None:
    assert rows.put("words/Word", {"n": 1}).status_code == 201
    assert rows.put("words/wORD", {"w": "word", "n": 2}).status_code == 200
    assert rows.get("words/WORD").json() == {"w": "word", "n": 2}
    assert rows.put("words/WORD", {"n": 3}).json() == {"w": "word", "n": 3}
    rows.refused(rows.put("words/WORD", {"w": "words", "n": 3}), 400, "invalid_request")
    assert rows.put("money/5.50", {"k": 5.5, "v": 1}).status_code == 201
    assert rows.put("money/5.5", {"k": "5.500", "v": 2}).status_code == 200
    assert rows.put("money/7", {"k": 7.0}).status_code == 201


# --- values ----------------------------------------------------------------------------------------------


def test_row_in_plain_json_round_trips(rows: Rows) -> None:
    body = {
        "u": "9007199254740993",
        "d": "12.3400",
        "r": 2,
        "j": {"a": [1, {"t": "null"}]},
        "b": "AP8=",
        "o": True,
        "t": "2026-01-18T12:34:56Z",
        "e": [0.5, 1.0],
        "x": "text",
    }
    made = rows.put("kinds/1", body)
    assert made.status_code == 201, made.text
    assert made.json() == {"id": 1, **body, "r": 2.0}
    again = rows.put("kinds/1", made.json(), if_match=made.headers["etag"])
    assert (again.status_code, again.headers["etag"]) == (200, made.headers["etag"])
    assert rows.put("kinds/1", dict.fromkeys(body)).json() == {"id": 1, **dict.fromkeys(body)}
    for value in (1, 1.5, "x", None, True):
        assert rows.patch("kinds/1", {"x": value}).json()["x"] == value
    assert rows.patch("kinds/1", {"d": 3, "u": 3}).json()["d"] == "3"


@pytest.mark.parametrize(
    ("column", "value"),
    [("u", -1), ("u", "x"), ("u", 1.5), ("u", True), ("d", 1.5), ("d", "x"), ("r", "1"), ("r", "NaN"), ("r", True)]
    + [("r", 2**53 + 1), ("b", "?"), ("b", 1), ("o", 1), ("o", "true"), ("t", "today"), ("e", "x"), ("e", ["x"])]
    + [("x", {"t": "i64", "v": 1}), ("x", []), ("x", 2**63), ("id", 1.0)],
)
def test_patch_value_of_the_wrong_kind_gets_400_naming_the_column(rows: Rows, column: str, value: Any) -> None:
    rows.put("kinds/1", {})
    problem = rows.refused(rows.patch("kinds/1", {column: value}), 400, "invalid_request")
    assert f"'{column}'" in problem["title"], problem


def test_row_in_literals_round_trips(rows: Rows) -> None:
    lits = {"x": {"t": "bytes", "b64": "AP8="}, "u": {"t": "u64", "v": 3}, "d": "1.50", "o": True, "j": None}
    rows.refused(rows.put("kinds/1", lits, content_type=OBJECTS), 400, "invalid_request")  # "1.50" is a str there
    lits["d"] = {"t": "dec", "v": "1.50"}
    made = rows.put("kinds/1", lits, content_type=OBJECTS, accept=OBJECTS)
    assert (made.status_code, made.headers["content-type"]) == (201, OBJECTS)
    found = made.json()
    assert (found["x"], found["d"], found["o"]) == (lits["x"], lits["d"], {"t": "bool", "v": True})
    assert found["r"] == {"t": "null"}
    got = rows.get("kinds/1", accept=OBJECTS)
    assert got.content == made.content and got.headers["etag"] == made.headers["etag"]
    assert rows.put("kinds/1", got.json(), content_type=OBJECTS).status_code == 200
    assert rows.get("kinds/1").json()["x"] == "AP8="


def test_row_has_another_tag_as_literals_than_as_plain_json_and_if_match_accepts_both(rows: Rows) -> None:
    rows.put("users/1", {"email": "a"})
    plain, lits = rows.get("users/1"), rows.get("users/1", accept=OBJECTS)
    assert plain.headers["etag"] != lits.headers["etag"], "one strong tag stands for the same bytes"
    assert rows.get("users/1", if_none_match=lits.headers["etag"]).status_code == 200
    assert rows.get("users/1", accept=OBJECTS, if_none_match=lits.headers["etag"]).status_code == 304
    assert rows.get("users/1", accept=OBJECTS, if_none_match=plain.headers["etag"]).status_code == 200
    assert rows.patch("users/1", {"age": 1}, if_match=lits.headers["etag"]).status_code == 200
    rows.refused(rows.patch("users/1", {"age": 2}, if_match=lits.headers["etag"]), 412, "precondition_failed")
    rows.refused(rows.patch("users/1", {"age": 2}, if_match=plain.headers["etag"]), 412, "precondition_failed")


@pytest.mark.parametrize(
    ("accept", "lits"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("text/html", False),
        (OBJECTS, True),
        (OBJECTS.upper(), True),
        (f"application/json;q=0.5, {OBJECTS}", True),
        (f"application/json, {OBJECTS};q=0.5", False),
        (f"application/json, {OBJECTS}", True),
        (f"{OBJECTS};q=0", False),
        (f"{OBJECTS}; q=x", True),
    ],
)
def test_accept_header_selects_plain_json_or_literals_of_a_row(accept: str, lits: bool) -> None:
    kinds = (OBJECTS.encode(), b"application/json")
    assert wanted_kind(accept.encode(), kinds, default=b"application/json") == kinds[not lits]


def test_stored_values_of_another_type_than_their_columns_are_returned_unchanged(rows: Rows) -> None:
    rows.files.run(
        "INSERT INTO kinds VALUES (1, 'abc', 1.5, 9e999, '{', CAST(x'ff' AS TEXT), 7, 'x', x'00', CAST(x'ff' AS TEXT))"
    )
    plain, lits = rows.get("kinds/1"), rows.get("kinds/1", accept=OBJECTS)
    assert plain.json() == {
        "id": 1,
        "u": "abc",
        "d": "1.5",
        "r": None,
        "j": "{",
        "b": "/w==",
        "o": 7,
        "t": "x",
        "e": "AA==",
        "x": "/w==",
    }
    assert lits.json()["r"] == {"t": "f64", "v": "Infinity"} and lits.json()["u"] == {"t": "str", "v": "abc"}
    tag = plain.headers["etag"]
    assert rows.get("kinds/1", if_none_match=tag).status_code == 304
    rows.files.run("UPDATE kinds SET b = x'ff'")  # written alike in both forms, and yet another row
    assert rows.get("kinds/1").content == plain.content
    assert rows.get("kinds/1", if_none_match=tag).status_code == 200
    assert rows.patch("kinds/1", {"o": True}, if_match=rows.get("kinds/1").headers["etag"]).status_code == 200


def test_generated_columns_are_ignored_in_put_and_refused_in_patch(rows: Rows) -> None:
    made = rows.put("made/1", {"n": 2})
    assert made.json() == {"id": 1, "n": 2, "twice": 4, "once": 2}
    again = rows.put("made/1", made.json() | {"n": 3})
    assert again.json() == {"id": 1, "n": 3, "twice": 6, "once": 3}
    assert "generated" in rows.refused(rows.patch("made/1", {"twice": 1}), 400, "invalid_request")["title"]


def test_put_returns_the_row_and_etag_after_triggers_ran(rows: Rows) -> None:
    made = rows.put("stamped/1", {"n": 1})
    assert made.json() == {"id": 1, "n": 1, "at": "now"}
    assert rows.get("stamped/1").headers["etag"] == made.headers["etag"]


def test_row_write_suppressed_by_a_trigger_gets_409(rows: Rows) -> None:
    assert rows.put("kept/1", {"n": 1}).status_code in (201, 409)
    rows.refused(rows.put("kept/1", {"n": 2}), 409, "conflict")
    rows.refused(rows.patch("kept/1", {"n": 2}), 409, "conflict")
    rows.refused(rows.delete("kept/1"), 409, "conflict")
    rows.refused(rows.put("kept/2", {"n": 2}), 409, "conflict")
    assert rows.get("kept/1").json() == {"id": 1, "n": 1}


# --- refusals --------------------------------------------------------------------------------------------


def test_unknown_name_is_refused_with_a_hint(rows: Rows) -> None:
    rows.put("users/1", {"email": "a"})
    assert "users" in rows.refused(rows.get("user/1"), 404, "not_found")["hint"]
    for response in (rows.put("user/1", {}), rows.patch("user/1", {"a": 1}), rows.delete("user/1")):
        assert rows.refused(response, 404, "not_found")["hint"] == "See schema.list_tables."
    for db in ("nowhere", "..", "%FF", "a%2Fb"):
        path = f"/api/v1/t/{db}/users/1"
        for response in (rows.get(path), rows.put(path, {}), rows.delete(path)):
            rows.refused(response, 404, "not_found")
    rows.refused(rows.get("%FF/1"), 404, "not_found")
    rows.refused(rows.put("sqlite_schema/1", {}), 404, "not_found")
    rows.refused(rows.get("_headwater_meta/1"), 404, "not_found")
    for response in (rows.put("users/1", {"emial": "b"}), rows.patch("users/1", {"emial": "b"})):
        problem = rows.refused(response, 400, "invalid_request")
        assert "'emial'" in problem["title"] and "email" in problem["hint"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"1", b'"x"', b"null", b"\xff", b'{"age": 1', b"[" * 5000, b'{"age": "\\ud800"}']
)
def test_row_body_that_is_not_a_json_object_gets_400(rows: Rows, body: bytes) -> None:
    rows.put("users/1", {"email": "a"})
    for method in ("PUT", "PATCH"):
        assert rows.refused(rows.ask(method, "users/1", body), 400, "invalid_request")["hint"]


def test_patch_without_columns_gets_400(rows: Rows) -> None:
    rows.put("users/1", {"email": "a"})
    rows.refused(rows.patch("users/1", {}), 400, "invalid_request")


def test_row_body_with_a_wrong_content_type_gets_415_and_an_oversized_one_413(rows: Rows) -> None:
    for method in ("PUT", "PATCH"):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/merge-patch+json", ""):
            rows.refused(rows.ask(method, "users/1", b"{}", content_type=kind), 415, "invalid_request")
        assert rows.ask(method, "users/1", b"{", content_type="Application/JSON; charset=utf-8").status_code == 400
        rows.refused(rows.ask(method, "users/1", b" " * 200_000), 413, "request_too_large")
        rows.refused(rows.ask(method, "users/1"), 415, "invalid_request")
    rows.refused(rows.ask("DELETE", "users/1", {"a": 1}), 400, "invalid_request")
    rows.refused(rows.put("users/1", {"email": "a"}, content_range="bytes 0-1/2"), 400, "invalid_request")


def test_row_write_that_violates_a_constraint_is_refused(rows: Rows) -> None:
    rows.put("users/1", {"email": "a"})
    rows.refused(rows.put("users/2", {"email": "a"}), 409, "duplicate_key")
    rows.refused(rows.put("users/1", {"email": None}), 400, "invalid_request")
    rows.refused(rows.put("children/1", {"p": 99}), 400, "invalid_request")
    assert rows.client.rows("SELECT count(*) FROM users") == [[1]]


def test_other_methods_and_a_query_string_are_refused(rows: Rows) -> None:
    for method in ("POST", "OPTIONS", "TRACE", "PROPFIND"):
        response = rows.ask(method, "users/1")
        assert response.status_code == 405
        assert response.headers["allow"] == "GET, HEAD, PUT, PATCH, DELETE"
    for method in ("GET", "PUT", "PATCH", "DELETE"):
        rows.refused(rows.ask(method, "users/1?x=1"), 400, "invalid_request")


def test_row_request_with_a_foreign_origin_or_host_gets_403(rows: Rows) -> None:
    rows.put("users/1", {"email": "a"})
    for method in ("GET", "PUT", "PATCH", "DELETE"):
        rows.refused(rows.ask(method, "users/1", {"age": 1}, origin="http://evil.example"), 403, "forbidden")
        rows.refused(rows.ask(method, "users/1", {"age": 1}, host="evil.example"), 403, "forbidden")
    asked = rows.ask("OPTIONS", "users/1", origin="http://localhost:3000")
    assert {"PUT", "PATCH", "DELETE"} <= set(asked.headers["access-control-allow-methods"].split(", "))
    got = rows.get("users/1", origin="http://localhost:3000")
    assert got.headers.get_list("vary") == ["Accept", "origin"]


def test_row_read_with_a_reached_causality_token_is_no_store_and_ahead_of_it_gets_412(rows: Rows) -> None:
    seen = rows.put("users/1", {"email": "a"}).headers["x-headwater-causality"]
    got = rows.get("users/1", x_headwater_causality=seen)
    assert (got.status_code, got.headers["cache-control"]) == (200, "no-store")
    same = rows.get("users/1", x_headwater_causality=seen, if_none_match=got.headers["etag"])
    assert (same.status_code, same.headers["cache-control"]) == (304, "no-store")
    ahead = to_header(token("main", {"users": 10**12}))
    rows.refused(rows.get("users/1", x_headwater_causality=ahead), 412, "precondition_failed")
    assert rows.get("users/1", x_headwater_causality=to_header(token("other", {"x": 10**12}))).status_code == 200
    rows.refused(rows.get("users/1", x_headwater_causality="?"), 400, "invalid_request")


@pytest.mark.parametrize(
    ("role", "reads", "writes"),
    [("viewer", True, False), ("editor", True, True), ("owner", True, True), ("", False, False)],
)
def test_row_routes_admit_viewers_to_reads_and_editors_to_writes(
    monkeypatch: pytest.MonkeyPatch, role: str, reads: bool, writes: bool
) -> None:
    with serving(NoDatabases(), token=Secret("t")) as client:
        monkeypatch.setattr(client.server._gate, "admit", lambda *_: Principal("somebody", role))
        for method in ("GET", "HEAD", "PUT", "PATCH", "DELETE"):
            allowed = reads if method in ("GET", "HEAD") else writes
            body = {"json": {"a": 1}} if method in ("PUT", "PATCH") else {}
            status = client.http.request(method, "/api/v1/t/main/users/1", **body).status_code
            assert status == (404 if allowed else 403), method
