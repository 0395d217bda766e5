"""JWTs: who is trusted, until when, and that nothing in a token chooses how it is checked."""

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
from headwater.serve.auth import Gate
from headwater.serve.jwts import Jwts

SECRET = "s" * 40
NOW = int(time.time())


def signed(claims: dict[str, Any], key: Any = SECRET, algorithm: str = "HS256", **head: Any) -> bytes:
    return jwt.encode({"sub": "ann", **claims}, key, algorithm, headers=head or None).encode()


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
        ({"role": "root"}, "viewer", None),
        ({"tenant_id": "shop"}, "viewer", (Scope("shop"),)),
        ({"tenant_id": "default"}, "viewer", (Scope("main"),)),
        ({"scopes": ["shop.a", "shop.b", "main"]}, "viewer", (Scope("main"), Scope("shop", ("a", "b")))),
        ({"scopes": []}, "viewer", ()),
    ],
)
def test_claims_become_a_principal(claims: dict[str, Any], role: str, scopes: Any) -> None:
    who = checker().check(signed(claims))
    assert (who.name, who.role, who.scopes, who.until) == ("ann", role, scopes, None)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"exp": NOW - 60}, "expired"),
        ({"nbf": NOW + 600}, "trusts"),
        ({"sub": ""}, "trusts"),
        ({"sub": 7}, "trusts"),
        ({"scopes": "shop"}, "trusts"),
        ({"scopes": [""]}, "trusts"),
        ({"exp": "soon"}, "trusts"),
        ({"exp": float("inf")}, "trusts"),
    ],
)
def test_what_is_not_to_be_trusted_is_refused(claims: dict[str, Any], words: str) -> None:
    with pytest.raises(Unauthorized, match=words):
        checker().check(signed(claims))


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


def test_a_token_does_not_choose_how_it_is_checked(jwks: str, pair: Any) -> None:
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


def test_one_that_was_good_expires_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    one, token = checker(), signed({"exp": NOW + 100})
    assert one.check(token).until == (NOW + 130) * 1000
    monkeypatch.setattr("headwater.serve.jwts.time.time_ns", lambda: (NOW + 131) * 1_000_000_000)
    with pytest.raises(Unauthorized, match="expired"):
        one.check(token)


def test_bad_settings_are_said_at_the_start(tmp_path: Path) -> None:
    open_to_all = Gate.of(ServeConfig())
    assert not open_to_all.locked and open_to_all._jwts is None
    with pytest.raises(ConfigError, match="32 bytes"):
        Jwts.of(ServeConfig(jwt_secret=Secret("short")))
    (tmp_path / "bad").write_text("{}")
    for path in (tmp_path / "absent", tmp_path / "bad"):
        with pytest.raises(ConfigError, match="cannot be read"):
            Jwts.of(ServeConfig(jwt_keys=str(path)))
