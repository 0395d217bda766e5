"""JSON Web Tokens of others: checked by a shared secret (HS256) or by the public keys of a file (RS256)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt

from headwater.config import ServeConfig
from headwater.errors import ConfigError, Unauthorized
from headwater.model.database import real_name
from headwater.model.principal import EDITOR, JWT, OWNER, RANK, VIEWER, Principal, Scope

REMEMBERED = 1024  # tokens that were checked: a client sends the same one with every request
LEEWAY = 30  # seconds that two clocks may differ
EXPIRED = "the token has expired"
_BAD = "the token is not one that this server trusts"
_CAPABILITIES = (("admin", OWNER), ("write", EDITOR), ("read", VIEWER))  # what SochDB's tokens say, the most first


class Jwts:
    """Checks tokens. One that is not to be trusted is told apart from one that has expired, and from nothing else."""

    def __init__(
        self,
        *,
        secret: bytes | None = None,
        keys: jwt.PyJWKSet | None = None,
        issuer: str | None = None,
        audience: str | None = None,
    ) -> None:
        self._secret, self._keys = secret, keys
        self._issuer, self._audience = issuer, audience
        self._checked: Callable[[str], Principal] = functools.lru_cache(REMEMBERED)(self._check)

    @classmethod
    def of(cls, config: ServeConfig) -> Jwts:
        """As `config` says."""
        secret = None if config.jwt_secret is None else config.jwt_secret.encode()
        if secret is not None and len(secret) < 32:
            raise ConfigError(
                "the secret of JWTs is shorter than 32 bytes", hint="Use HEADWATER_JWT_SECRET=$(openssl rand -hex 32)."
            )
        keys = None if config.jwt_keys is None else _read(Path(config.jwt_keys))
        return cls(secret=secret, keys=keys, issuer=config.jwt_issuer, audience=config.jwt_audience)

    def check(self, text: bytes) -> Principal:
        """Who the token speaks for; Unauthorized."""
        try:
            found = self._checked(text.decode("ascii"))
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            if isinstance(error, jwt.ExpiredSignatureError):
                raise _expired() from None
            raise Unauthorized(_BAD, hint="Ask its issuer for another.") from None
        if found.until is not None and time.time_ns() // 1_000_000 >= found.until:
            raise _expired()
        return found

    def _check(self, text: str) -> Principal:
        head = jwt.get_unverified_header(text)
        # The algorithm follows from the key that we chose, never from the token alone.
        if head.get("alg") == "HS256" and self._secret is not None:
            key: Any = self._secret
        elif head.get("alg") == "RS256" and self._keys is not None:
            key = self._public(head.get("kid"))
        else:
            raise jwt.InvalidAlgorithmError
        claims = jwt.decode(
            text,
            key,
            algorithms=[head["alg"]],
            issuer=self._issuer,
            audience=self._audience,
            leeway=LEEWAY,
            options={"verify_aud": self._audience is not None, "require": ["sub"]},
        )
        return _principal(claims)

    def _public(self, kid: object) -> Any:
        """The key of that id; of a token without one the only key there is."""
        keys = [key for key in (self._keys.keys if self._keys is not None else ()) if key.key_type == "RSA"]
        fitting = [key for key in keys if kid is None or key.key_id == kid]
        if len(fitting) != 1:
            raise jwt.InvalidKeyError
        return fitting[0].key


def _principal(claims: dict[str, Any]) -> Principal:
    name, until = claims["sub"], claims.get("exp")
    if not isinstance(name, str) or not name:
        raise ValueError("no subject")
    return Principal(
        name[:200],
        _role(claims),
        _scopes(claims),
        credential=f"{JWT}{claims['jti']}" if isinstance(claims.get("jti"), str) else "",
        until=None if until is None else int(until) * 1000 + LEEWAY * 1000,
    )


def _role(claims: dict[str, Any]) -> str:
    """By `role`, else by the capabilities; who says neither may read."""
    role = claims.get("role")
    if isinstance(role, str) and role.lower() in RANK:
        return role.lower()
    said = {str(each).lower() for each in claims.get("capabilities") or ()}
    return next((role for word, role in _CAPABILITIES if word in said), VIEWER)


def _scopes(claims: dict[str, Any]) -> tuple[Scope, ...] | None:
    """`scopes` as in security.token.create; else the database that `tenant_id` names; without either everything."""
    given = claims.get("scopes")
    if given is not None:
        return scopes_of(given)
    tenant = claims.get("tenant_id")
    return None if tenant is None else (Scope(real_name(str(tenant))),)


def scopes_of(given: Any) -> tuple[Scope, ...]:
    """`["shop", "main.orders"]` as scopes: a database, or one of its tables."""
    if not isinstance(given, list) or not all(isinstance(each, str) and each for each in given):
        raise ValueError("scopes are a list of texts")
    found: dict[str, set[str]] = {}
    for text in given:
        db, _, table = text.partition(".")
        found.setdefault(real_name(db), set()).add(table)
    return tuple(Scope(db, () if "" in tables else tuple(sorted(tables))) for db, tables in sorted(found.items()))


def _read(path: Path) -> jwt.PyJWKSet:
    try:
        return jwt.PyJWKSet.from_json(path.read_text())
    except (OSError, ValueError, jwt.PyJWTError) as error:
        raise ConfigError(
            f"the keys of JWTs cannot be read: {type(error).__name__}", hint="serve.jwt_keys names a JWKS file."
        ) from None


def _expired() -> Unauthorized:
    return Unauthorized(EXPIRED, hint="Ask its issuer for another.", expired=True)
