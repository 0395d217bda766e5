"""JWTs: trusted issuers, expiry, and that no field of a token chooses how it is verified."""

import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from headwater.config import Secret, ServeConfig
from headwater.errors import ConfigError, Unauthorized
from headwater.model.principal import Scope
from headwater.serve.auth.gate import MAX_CREDENTIAL, Gate
from headwater.serve.auth.json_web_tokens import Jwts

SECRET = "s" * 40
NOW = int(time.time())  # as it is collected: it may run an hour later
LATER = NOW + 86_400
NULL = object()  # a claim that is there, and is JSON's null


def signed(claims: dict[str, Any], key: Any = SECRET, algorithm: str = "HS256", **head: Any) -> bytes:
    """Return a JWT that is valid for ten minutes unless `claims` differ; a claim that is None is omitted."""
    whole = {"sub": "ann", "exp": LATER, **claims}
    sent = {name: None if value is NULL else value for name, value in whole.items() if value is not None}
    return jwt.encode(sent, key, algorithm, headers=head or None).encode()


@pytest.fixture(scope="module")
def pair() -> Any:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture
def jwks(pair: Any, tmp_path: Path) -> str:
    path = tmp_path / "jwks.json"
    key = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(pair.public_key()))
    path.write_text(json.dumps({"keys": [{**key, "kid": "one", "use": "sig"}]}))
    return str(path)


def checker(**settings: Any) -> Jwts:
    return Jwts.of(ServeConfig(**({"jwt_secret": Secret(SECRET)} | settings)))


@pytest.mark.parametrize(
    ("claims", "role", "scopes"),
    [
        ({}, "viewer", None),
        ({"role": "Owner"}, "owner", None),
        ({"role": "Custom", "capabilities": ["Read", "Write"]}, "editor", None),
        ({"capabilities": ["Admin"]}, "owner", None),
        ({"tenant_id": "shop"}, "viewer", (Scope("shop"),)),
        ({"tenant_id": "default"}, "viewer", (Scope("main"),)),
        ({"scopes": ["shop.a", "shop.b", "main"]}, "viewer", (Scope("main"), Scope("shop", ("a", "b")))),
        ({"scopes": []}, "viewer", ()),
    ],
)
def test_claims_determine_the_role_scopes_and_expiry_of_the_principal(
    claims: dict[str, Any], role: str, scopes: Any
) -> None:
    who = checker().check(signed(claims))
    assert (who.name, who.role, who.scopes, who.until) == ("ann", role, scopes, (LATER + 30) * 1000)


REFUSED = [  # claims, the caller's error, and the reason in the server's log
    ({"exp": NOW - 60}, "expired", "expired"),
    ({"exp": None}, "trusts", "no `exp`"),
    ({"nbf": LATER}, "trusts", "`nbf`"),
    ({"sub": None}, "trusts", "no `sub`"),
    ({"sub": ""}, "trusts", "`sub` is no name"),
    ({"sub": 7}, "trusts", "`sub` is no name"),
    ({"scopes": "sh0p"}, "trusts", "`scopes` are no list"),
    ({"scopes": [""]}, "trusts", "`scopes` are no list"),
    ({"role": "r00t"}, "trusts", "`role` is none of viewer, editor, owner"),
    ({"role": 3}, "trusts", "`role` is none of"),
    ({"role": "r00t", "capabilities": ["fly"]}, "trusts", "`role` is none of"),
    ({"capabilities": []}, "trusts", "`capabilities` have none of"),
    ({"capabilities": "Admin"}, "trusts", "`capabilities` have none of"),
    ({"exp": "so0n"}, "trusts", "no number"),
    ({"exp": float("inf")}, "trusts", "no number"),
    ({"exp": 1e300}, "trusts", "`exp` is no time"),
    ({"exp": 10**30}, "trusts", "`exp` is no time"),
    ({"exp": str(LATER)}, "trusts", "`exp` is no number"),
    ({"exp": True}, "expired", "expired"),
    ({"nbf": "0"}, "trusts", "`nbf` is no number"),
    ({"sub": "a\nb"}, "trusts", "`sub` is no name"),
    ({"sub": "a\u202eb"}, "trusts", "`sub` is no name"),
    ({"sub": " "}, "trusts", "`sub` is no name"),
    ({"sub": "a" * 201}, "trusts", "`sub` is no name of at most 200"),
    ({"scopes": NULL}, "trusts", "`scopes` are no list"),
    ({"scopes": {}}, "trusts", "`scopes` are no list"),
    ({"tenant_id": NULL}, "trusts", "`tenant_id` is no name"),
    ({"tenant_id": ""}, "trusts", "`tenant_id` is no name"),
    ({"tenant_id": 5}, "trusts", "`tenant_id` is no name"),
    ({"tenant_id": ["shop"]}, "trusts", "`tenant_id` is no name"),
    ({"tenant_id": NULL, "scopes": ["shop"]}, "trusts", "`tenant_id` is no name"),
    ({"role": NULL}, "trusts", "`role` is none of"),
    ({"role": "auditor", "capabilities": ["admin"]}, "trusts", "`role` is none of"),
    ({"capabilities": ["fly", "read"]}, "trusts", "`role` is none of"),
    ({"capabilities": ["admin", "read-only"]}, "trusts", "`role` is none of"),
    ({"scopes": ["main."]}, "trusts", "empty before or after the dot"),
    ({"scopes": ["."]}, "trusts", "empty before or after the dot"),
    ({"scopes": ["shop.a"], "tenant_id": "other"}, "trusts", "beyond its `tenant_id`"),
    ({"role": "viewer", "capabilities": NULL}, "trusts", "`role` is none of"),
    ({"role": "viewer", "capabilities": [1]}, "trusts", "`role` is none of"),
    ({"jti": 5}, "trusts", "cannot be read"),
    ({"jti": NULL}, "trusts", "cannot be read"),
]


@pytest.mark.parametrize(("claims", "words", "logged"), REFUSED)
def test_untrusted_token_is_refused_and_the_reason_is_logged(
    claims: dict[str, Any], words: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    token = signed(claims)
    with pytest.raises(Unauthorized, match=words) as found:
        checker().check(token)
    assert logged in caplog.text and (words == "expired" or logged not in found.value.message + found.value.hint)
    for secret in (" ann", "sh0p", "r00t", "so0n", token.decode()):
        assert secret not in caplog.text


def test_rejected_jwt_logs_whether_signature_algorithm_kid_audience_or_issuer_is_wrong(
    jwks: str, pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    strict = checker(jwt_keys=jwks, jwt_issuer="us", jwt_audience="headwater")
    good = {"iss": "us", "aud": "headwater"}
    for token, logged in (
        (signed(good, "x" * 40), "signature"),
        (signed(good, "x" * 64, "HS512"), "algorithm"),
        (signed(good, pair, "RS256", kid="two"), "`kid`"),
        (signed(good | {"aud": "other"}), "serve.jwt_audience"),
        (signed(good | {"aud": None}), "no `aud`"),
        (signed(good | {"iss": "them"}), "serve.jwt_issuer"),
        (b"a.b.c", "cannot be read"),
    ):
        caplog.clear()
        with pytest.raises(Unauthorized):
            strict.check(token)
        assert caplog.text.count("a JWT was refused") == 1 and logged in caplog.text


def test_repeated_bad_tokens_are_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = checker()
    for now in (1.0, 2.0, 3.0, 62.0):
        monkeypatch.setattr("headwater.serve.auth.json_web_tokens.time.monotonic", lambda now=now: now)
        for token in (signed({"sub": ""}), b"a.b.c"):
            with pytest.raises(Unauthorized):
                one.check(token)
    assert len(caplog.records) == 4 and caplog.text.count("and 2 more") == 2


def test_issuer_and_audience_are_checked_where_they_are_set() -> None:
    strict = checker(jwt_issuer="us", jwt_audience="headwater")
    assert strict.check(signed({"iss": "us", "aud": ["x", "headwater"]})).name == "ann"
    for claims in ({}, {"iss": "us"}, {"aud": "headwater"}, {"iss": "them", "aud": "headwater"}):
        with pytest.raises(Unauthorized):
            strict.check(signed(claims))


def test_public_keys_of_a_file_are_trusted_and_no_other(jwks: str, pair: Any) -> None:
    both = checker(jwt_keys=jwks)
    assert both.check(signed({}, pair, "RS256", kid="one")).name == "ann"
    assert both.check(signed({}, pair, "RS256")).name == "ann"
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    for token in (signed({}, pair, "RS256", kid="two"), signed({}, other, "RS256", kid="one")):
        with pytest.raises(Unauthorized):
            both.check(token)


def test_jwt_with_alg_none_or_an_algorithm_not_configured_for_the_key_is_unauthorized(jwks: str, pair: Any) -> None:
    public = pair.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    only_public = checker(jwt_secret=None, jwt_keys=jwks)
    head, body = (
        jwt.utils.base64url_encode(json.dumps(part).encode())
        for part in ({"alg": "none"}, {"sub": "x", "role": "owner"})
    )
    confused = jwt.utils.base64url_encode(json.dumps({"alg": "HS256"}).encode()) + b"." + body
    signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    forged = confused + b"." + jwt.utils.base64url_encode(signature.sign(confused, public))
    for token in (head + b"." + body + b".", forged, signed({}, SECRET), signed({}, pair, "RS512")):
        with pytest.raises(Unauthorized):
            only_public.check(token)
    with pytest.raises(Unauthorized):
        checker().check(signed({}, pair, "RS256"))
    deep = jwt.utils.base64url_encode(b"[" * 40_000) + b".."
    for junk in (deep, b"..", b"a.b.c", b"\xff.\xff.\xff", b"." * 2 + b"x" * 9000):
        with pytest.raises(Unauthorized):
            only_public.check(junk)


def test_same_subject_of_two_issuers_is_two_accounts() -> None:
    found = [checker().check(signed({"iss": issuer, "jti": id})) for issuer in ("us", "them") for id in ("1", "2")]
    assert {who.name for who in found} == {"ann"}
    assert len({who.account for who in found}) == 2


def test_accepted_token_is_refused_after_its_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    one, token = checker(), signed({"exp": LATER})
    assert one.check(token).until == (LATER + 30) * 1000
    monkeypatch.setattr("headwater.serve.auth.json_web_tokens.time.time_ns", lambda: (LATER + 31) * 1_000_000_000)
    with pytest.raises(Unauthorized, match="expired"):
        one.check(token)


def test_short_secret_or_unreadable_key_file_is_refused_at_the_start(tmp_path: Path) -> None:
    open_to_all = Gate.of(ServeConfig())
    assert not open_to_all.locked and open_to_all._jwts is None
    with pytest.raises(ConfigError, match="32 bytes"):
        Jwts.of(ServeConfig(jwt_secret=Secret("short")))
    (tmp_path / "bad").write_text("{}")
    for path in (tmp_path / "absent", tmp_path / "bad"):
        with pytest.raises(ConfigError, match="cannot be read"):
            Jwts.of(ServeConfig(jwt_keys=str(path)))


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_token_of_more_than_8_kib_is_refused_before_it_is_decoded(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(None, jwts=checker(), locked=True)
    prefix = b"Bearer " if header == "authorization" else b""
    short, long = (signed({"note": "x" * size}) for size in (1_000, 8_000))
    assert len(long) > MAX_CREDENTIAL
    assert gate.admit_call([(header.encode(), prefix + short)]).name == "ann"
    monkeypatch.setattr(jwt, "get_unverified_header", None)
    with pytest.raises(Unauthorized, match="too long"):
        gate.admit_call([(header.encode(), prefix + long)])
