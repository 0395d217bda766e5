"""The TLS certificate of both ports, reloadable, and the authorities that verify client certificates."""

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


class PemFiles(NamedTuple):
    """The contents of the files when they were last valid."""

    chain: bytes
    key: bytes
    authorities: bytes | None  # verify client certificates


class Tls:
    """A certificate and its key; `context` is used by HTTP and serves the new certificate after a reload."""

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
        """Load the certificate that `config` names; None without one, ConfigError if it cannot be loaded."""
        if config.tls_cert is not None:
            if config.tls_http_clients and config.tls_ca is None:
                hint = "Set serve.tls_ca to the certificates of their authorities."
                raise ConfigError("serve.tls_http_clients is set and serve.tls_ca is not", hint=hint)
            return cls(config)
        for name in ("tls_key", "tls_ca", "tls_http_clients"):
            if getattr(config, name):
                raise ConfigError(f"serve.{name} is set and serve.tls_cert is not", hint="Set both, or neither.")
        return None

    def reload(self) -> bool:
        """Read the files again, for new connections; return whether they are valid. Open connections are unaffected."""
        try:
            pems = self._read()
            self._loaded()  # validated first: half a certificate would be worse than an old one
            self._load(self.context)
        except ConfigError as error:
            log.error("the certificate was not reloaded, the old one remains in use: %s %s", error.message, error.hint)
            return False
        self.pems = pems
        log.info("the certificate was reloaded from %s", self._chain)
        return True

    def _read(self) -> PemFiles:
        authorities = None if self._authorities is None else _bytes(self._authorities)
        pems = PemFiles(_bytes(self._chain), _bytes(self._key), authorities)
        if self._key == self._chain and KEY_MARK not in pems.key:
            raise ConfigError(
                f"{self._chain} contains no private key, and serve.tls_key is not set",
                hint="Set the file of the key with --tls-key (serve.tls_key).",
            )
        if self._key.stat().st_mode & stat.S_IRWXO:
            log.warning("the private key %s is readable by other users: chmod 600 %s", self._key, self._key)
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
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"{self._chain} and {self._key} are not a TLS certificate and its key: {_reason(error)}",
                hint="Use PEM files, an unencrypted key, and the certificate of this key with its chain.",
            ) from None
        if self._authorities is None:
            return
        try:
            context.load_verify_locations(self._authorities)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._authorities} contains no certificates: {_reason(error)}",
                hint="Set serve.tls_ca to a PEM file.",
            ) from None
        if self._asks_http:
            context.verify_mode = ssl.CERT_REQUIRED


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="Check serve.tls_cert, serve.tls_key and serve.tls_ca."
        ) from None


def _no_password() -> str:
    """Raise an error, because OpenSSL would otherwise prompt at the terminal and wait."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
