"""The TLS certificate of both ports, reloadable, and the authorities that verify client certificates."""

from __future__ import annotations

import logging
import ssl
import stat
from pathlib import Path

from headwater.config import ServeConfig
from headwater.errors import ConfigError

KEY_MARK = b"PRIVATE KEY-----"  # of every kind of key in PEM
log = logging.getLogger(__name__)


class Tls:
    """A certificate and its key. `context` is used by HTTP and serves the new certificate after a reload.

    `grpc_context` is used by gRPC, whose clients need a certificate if there are authorities; a reload replaces it.
    """

    def __init__(self, config: ServeConfig) -> None:
        assert config.tls_cert is not None
        self._chain = Path(config.tls_cert)
        self._key = Path(config.tls_key or config.tls_cert)
        self._authorities = None if config.tls_ca is None else Path(config.tls_ca)
        self._asks_http = config.tls_http_clients
        self._check()
        self.context = self._loaded("http/1.1", asks=self._asks_http)
        self.grpc_context = self._loaded("h2", asks=self._authorities is not None)

    @classmethod
    def of(cls, config: ServeConfig) -> Tls | None:
        """Load the certificate that `config` names; None without one, ConfigError if it cannot be loaded."""
        if config.tls_cert is not None:
            if config.tls_http_clients and config.tls_ca is None:
                raise ConfigError(
                    "serve.tls_http_clients demands client certificates, but serve.tls_ca is not set",
                    hint="Set serve.tls_ca to the authorities that signed them.",
                )
            return cls(config)
        for name in ("tls_key", "tls_ca", "tls_http_clients"):
            if getattr(config, name):
                raise ConfigError(f"serve.{name} is set and serve.tls_cert is not", hint="Set both, or neither.")
        return None

    def reload(self) -> bool:
        """Read the files again, for new connections; return whether they are valid. Open connections are unaffected."""
        try:
            self._check()
            # Loaded here first: half a certificate in use would be worse than an old one.
            renewed = self._loaded("h2", asks=self._authorities is not None)
            self._load(self.context)
        except ConfigError as error:
            log.error("the certificate was not reloaded, the old one remains in use: %s %s", error.message, error.hint)
            return False
        self.grpc_context = renewed
        log.info("the certificate was reloaded from %s", self._chain)
        return True

    def _check(self) -> None:
        """Raise ConfigError if a file cannot be read or there is no key; warn if others may read the key."""
        for path in (self._chain, self._key, self._authorities):
            found = b"" if path is None else _bytes(path)
            if path == self._chain == self._key and KEY_MARK not in found:
                raise ConfigError(
                    f"{self._chain} contains no private key, and serve.tls_key is not set",
                    hint="Set the file of the key with --tls-key (serve.tls_key).",
                )
        if self._key.stat().st_mode & stat.S_IRWXO:
            log.warning("the private key %s is readable by other users: chmod 600 %s", self._key, self._key)

    def _loaded(self, protocol: str, *, asks: bool) -> ssl.SSLContext:
        """Return a TLS context for `protocol`, which demands a certificate from clients if `asks`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([protocol])
        self._load(context)
        if asks:
            context.verify_mode = ssl.CERT_REQUIRED
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
