"""TLS contexts of clients: trusted are the authorities of the system, and those of a file."""

from __future__ import annotations

import os
import ssl

from headwater.errors import ConfigError

CA = "HEADWATER_CA"  # the file, where no argument names one


def tls_context(file: str | None = None) -> ssl.SSLContext:
    """Return a context that trusts the system's authorities and those in `file`, or in the file of HEADWATER_CA."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    named = file or os.environ.get(CA)
    if named:
        try:
            context.load_verify_locations(named)
        except OSError as error:  # ssl.SSLError is one
            reason = getattr(error, "reason", None) or error.strerror
            raise ConfigError(f"{named} holds no certificates: {reason}", hint=f"Check {CA} or --ca.") from None
    return context
