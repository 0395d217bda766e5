"""Whom a client believes to be the server: the authorities of the system, and those of a file."""

from __future__ import annotations

import os
import ssl

from headwater.errors import ConfigError

CA = "HEADWATER_CA"  # names the file where nothing else does


def trusting(file: str | None = None) -> ssl.SSLContext:
    """Contexts for TLS that trust the system's authorities and those in `file`, or in that of HEADWATER_CA."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    named = file or os.environ.get(CA)
    if named:
        try:
            context.load_verify_locations(named)
        except OSError as error:  # that of TLS is one
            reason = getattr(error, "reason", None) or error.strerror
            raise ConfigError(f"{named} holds no certificates: {reason}", hint=f"Look at {CA} or --ca.") from None
    return context
