"""Ending: why a stream ended, for transports that say so."""

from __future__ import annotations

import msgspec


class Ending(msgspec.Struct, frozen=True):
    """Why a stream ended, for transports that say so."""

    code: str  # closed, resnapshot_required, stopping, complete, or the code of an error
    message: str
