"""TLS: the certificate of both ports, read at the start and again when asked, and who must show one of their own."""

from __future__ import annotations

import logging
import ssl
import stat
from pathlib import Path
from typing import NamedTuple

from headwater.config import ServeConfig
from headwater.errors import ConfigError

KEY_MARK = b"PRIVATE KEY-----"  # of every kind of key in PEM
log = logging.getLogger(__name__)


class Pems(NamedTuple):
    """What the files held when they were last found good."""

    chain: bytes
    key: bytes
    authorities: bytes | None  # that vouch for clients


class Tls:
    """A certificate and its key. `context` is that of HTTP, and what it hands out changes with a reload."""

    def __init__(self, config: ServeConfig) -> None:
        assert config.tls_cert is not None
        self._chain = Path(config.tls_cert)
        self._key = Path(config.tls_key or config.tls_cert)
        self._authorities = None if config.tls_ca is None else Path(config.tls_ca)
        self._asks_http = config.tls_http_clients
        self.pems = self._read()
        self.context = self._loaded()

    @classmethod
    def of(cls, config: ServeConfig) -> Tls | None:
        """What `config` asks for; ConfigError where that cannot be had."""
        if config.tls_cert is not None:
            if config.tls_http_clients and config.tls_ca is None:
                hint = "Name the authorities that vouch for them with serve.tls_ca."
                raise ConfigError("serve.tls_http_clients is set and serve.tls_ca is not", hint=hint)
            return cls(config)
        for name in ("tls_key", "tls_ca", "tls_http_clients"):
            if getattr(config, name):
                raise ConfigError(f"serve.{name} is set and serve.tls_cert is not", hint="Set both, or neither.")
        return None

    def reload(self) -> bool:
        """Read the files again, for connections to come; whether they are good. What is open stays as it is."""
        try:
            pems = self._read()
            self._loaded()  # on trial: half a certificate would be worse than an old one
            self._load(self.context)
        except ConfigError as error:
            log.error("the certificate was not read again, the old one is kept: %s %s", error.message, error.hint)
            return False
        self.pems = pems
        log.info("the certificate was read again from %s", self._chain)
        return True

    def _read(self) -> Pems:
        authorities = None if self._authorities is None else _bytes(self._authorities)
        pems = Pems(_bytes(self._chain), _bytes(self._key), authorities)
        if self._key == self._chain and KEY_MARK not in pems.key:
            raise ConfigError(
                f"{self._chain} holds no key, and no other file was given",
                hint="Name the key's file with --tls-key (serve.tls_key).",
            )
        if self._key.stat().st_mode & stat.S_IRWXO:
            log.warning("others may read the key %s: chmod 600 %s", self._key, self._key)
        return pems

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self._chain, self._key, password=_no_password)
        except (OSError, ValueError) as error:  # that of TLS is one of them
            raise ConfigError(
                f"{self._chain} and {self._key} are no certificate and key of TLS: {_reason(error)}",
                hint="Both are PEM, the key is not encrypted, and the certificate is the key's, with its chain.",
            ) from None
        if self._authorities is None:
            return
        try:
            context.load_verify_locations(self._authorities)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._authorities} holds no certificates: {_reason(error)}", hint="serve.tls_ca is a file of PEM."
            ) from None
        if self._asks_http:
            context.verify_mode = ssl.CERT_REQUIRED


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="Look at serve.tls_cert and its like."
        ) from None


def _no_password() -> str:
    """Without it OpenSSL would ask at the terminal, and wait."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
