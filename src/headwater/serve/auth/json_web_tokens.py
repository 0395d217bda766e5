"""JSON Web Tokens of other issuers, verified by a shared secret (HS256) or the public keys of a file (RS256)."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt

from headwater.config import ServeConfig
from headwater.errors import ConfigError, Unauthorized
from headwater.model.database_name import real_name
from headwater.model.principal import EDITOR, JWT, OWNER, RANK, VIEWER, Principal, Scope, is_label
from headwater.model.work.log_throttle import LogThrottle, counted

log = logging.getLogger(__name__)

REMEMBERED = 1024  # verified tokens in the cache: a client sends the same one with every request
LEEWAY = 30  # seconds by which the issuer's clock may differ from ours
EXPIRED = "the token has expired"
MAX_SUBJECT = 200  # characters
MAX_TIME = 1e12  # seconds since 1970; a later time is taken for a mistake
_BAD = "the token is not one that this server trusts"
_CAPABILITIES = (("admin", OWNER), ("write", EDITOR), ("read", VIEWER))  # in SochDB's tokens, the highest right first
_REASONS: tuple[tuple[type[jwt.PyJWTError], str], ...] = (  # subclasses before their bases
    (jwt.ExpiredSignatureError, "it has expired"),
    (jwt.ImmatureSignatureError, "its `nbf` or `iat` is in the future"),
    (jwt.InvalidAudienceError, "its `aud` is not serve.jwt_audience"),
    (jwt.InvalidIssuerError, "its `iss` is not serve.jwt_issuer"),
    (jwt.InvalidSignatureError, "its signature is not by the key that is trusted"),
    (jwt.InvalidAlgorithmError, "its algorithm is not HS256 with serve.jwt_secret, nor RS256 with serve.jwt_keys"),
    (jwt.InvalidKeyError, "its `kid` names none of serve.jwt_keys, or it has none and there are several"),
)


class InvalidClaim(ValueError):
    """A claim with an unusable value; the message names the claim, and never contains its value."""


class Jwts:
    """Verifies tokens. The caller learns only whether a rejected token has expired.

    The reason is in the server's log, because the caller may be an attacker.
    """

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
        self._repeats = LogThrottle()  # limits the log lines caused by bad tokens
        self._checked: Callable[[str], Principal] = functools.lru_cache(REMEMBERED)(self._check)

    @classmethod
    def of(cls, config: ServeConfig) -> Jwts:
        """Build the verifier from `config`."""
        secret = None if config.jwt_secret is None else config.jwt_secret.encode()
        if secret is not None and len(secret) < 32:
            raise ConfigError(
                "serve.jwt_secret (HEADWATER_JWT_SECRET) is shorter than 32 bytes",
                hint="Use HEADWATER_JWT_SECRET=$(openssl rand -hex 32).",
            )
        keys = None if config.jwt_keys is None else _read(Path(config.jwt_keys))
        return cls(secret=secret, keys=keys, issuer=config.jwt_issuer, audience=config.jwt_audience)

    def check(self, text: bytes) -> Principal:
        """Return the caller that the token names; Unauthorized if the token is not valid or has expired."""
        try:
            found = self._checked(text.decode("ascii"))
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            self._log(_reason(error))
            if isinstance(error, jwt.ExpiredSignatureError):
                raise _expired() from None
            raise Unauthorized(_BAD, hint="Request a new one from its issuer.") from None
        if found.until is not None and time.time_ns() // 1_000_000 >= found.until:
            self._log(_reason(jwt.ExpiredSignatureError()))
            raise _expired()
        return found

    def _log(self, reason: str) -> None:
        left_out = self._repeats.again(reason, time.monotonic())
        if left_out is not None:
            log.warning("a JWT was refused: %s", counted(reason, left_out))

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
            options={"verify_aud": self._audience is not None, "verify_sub": False, "require": ["sub", "exp"]},
        )
        return _principal(claims)

    def _public(self, kid: object) -> Any:
        """Return the only RSA key, of this id if given; InvalidKeyError if there is none or there are several."""
        keys = [key for key in (self._keys.keys if self._keys is not None else ()) if key.key_type == "RSA"]
        fitting = [key for key in keys if kid is None or key.key_id == kid]
        if len(fitting) != 1:
            raise jwt.InvalidKeyError
        return fitting[0].key


def _principal(claims: dict[str, Any]) -> Principal:
    name, token = claims["sub"], claims.get("jti", "")
    if not is_label(name) or len(name) > MAX_SUBJECT:
        raise InvalidClaim(f"its `sub` is no name of at most {MAX_SUBJECT} printable characters")
    if "jti" in claims and not is_label(token):
        raise InvalidClaim("its `jti` is no text of printable characters")
    for claim in ("exp", "nbf", "iat"):
        if claim in claims and type(claims[claim]) not in (int, float):
            raise InvalidClaim(f"its `{claim}` is no number")
        if claim in claims and not abs(claims[claim]) <= MAX_TIME:  # rejects NaN too
            raise InvalidClaim(f"its `{claim}` is no time")
    return Principal(
        name,
        _role(claims),
        _scopes(claims),
        credential=f"{JWT}{token}" if token else "",
        until=int(claims["exp"]) * 1000 + LEEWAY * 1000,
        issuer=str(claims.get("iss", "")),
    )


def _role(claims: dict[str, Any]) -> str:
    """Return the role by `role`, else by `capabilities`; viewer if the token has neither.

    A claim that is present but not understood is rejected, not ignored: its issuer may have meant to forbid something.
    """
    if "role" not in claims and "capabilities" not in claims:
        return VIEWER
    role, capabilities = claims.get("role", ""), claims.get("capabilities", [])
    is_understood = (
        isinstance(role, str) and isinstance(capabilities, list) and all(isinstance(each, str) for each in capabilities)
    )
    if is_understood and role.lower() in RANK:
        return str(role.lower())
    words = {each.lower() for each in capabilities} if is_understood else set()
    # SochDB's tokens have the role Custom, or none, together with capabilities.
    if words and role.lower() in ("", "custom") and words <= {word for word, _ in _CAPABILITIES}:
        return next(found for word, found in _CAPABILITIES if word in words)
    raise InvalidClaim(
        f"its `role` is none of {', '.join(RANK)}, and its `capabilities` have none of read, write, admin"
    )


def _scopes(claims: dict[str, Any]) -> tuple[Scope, ...] | None:
    """Return `scopes` as in security.token.create, else the database named by `tenant_id`; None without either."""
    tenant = claims.get("tenant_id")
    if "tenant_id" in claims and not is_label(tenant):
        raise InvalidClaim("its `tenant_id` is no name of a database")
    if "scopes" in claims:
        scopes = scopes_of(claims["scopes"])
        if tenant is not None and any(scope.db != real_name(tenant) for scope in scopes):
            raise InvalidClaim("its `scopes` reach beyond its `tenant_id`")
        return scopes
    return None if tenant is None else (Scope(real_name(tenant)),)


def scopes_of(given: Any) -> tuple[Scope, ...]:
    """Return the scopes of `["shop", "main.orders"]`: databases, or single tables; InvalidClaim if it is malformed."""
    if not isinstance(given, list) or not all(isinstance(each, str) and each for each in given):
        raise InvalidClaim("its `scopes` are no list of texts")
    found: dict[str, set[str]] = {}
    for text in given:
        db, dot, table = text.partition(".")
        if not db or (dot and not table):
            raise InvalidClaim("its `scopes` have a name that is empty before or after the dot")
        found.setdefault(real_name(db), set()).add(table)
    return tuple(Scope(db, () if "" in tables else tuple(sorted(tables))) for db, tables in sorted(found.items()))


def _read(path: Path) -> jwt.PyJWKSet:
    try:
        return jwt.PyJWKSet.from_json(path.read_text())
    except (OSError, ValueError, jwt.PyJWTError) as error:
        raise ConfigError(
            f"the JWKS file cannot be read: {type(error).__name__}", hint="Set serve.jwt_keys to a readable JWKS file."
        ) from None


def _reason(error: Exception) -> str:
    """Return why a token was rejected, for the server's log, without any value from the token."""
    if isinstance(error, InvalidClaim):
        return str(error)
    if isinstance(error, jwt.MissingRequiredClaimError):
        return f"it has no `{error.claim}`"
    return next(
        (words for kind, words in _REASONS if isinstance(error, kind)),
        "it cannot be read, or a time in it is no number",
    )


def _expired() -> Unauthorized:
    return Unauthorized(EXPIRED, hint="Request a new one from its issuer.", expired=True)
