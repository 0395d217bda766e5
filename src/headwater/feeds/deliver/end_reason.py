"""Ending: why a stream ended, for transports that say so."""

from __future__ import annotations

import logging
import uuid

import msgspec

from headwater.errors import HeadwaterError

logger = logging.getLogger("headwater.feeds")


class Ending(msgspec.Struct, frozen=True):
    """Why a stream ended, for transports that say so."""

    code: str  # closed, resnapshot_required, stopping, complete, or the code of an error
    message: str
    error: HeadwaterError | None = None  # where it was one


def known(error: Exception) -> HeadwaterError:
    """`error` as its reader is told of it: of a defect of ours nothing but where to look for it."""
    if isinstance(error, HeadwaterError):
        return error
    request = uuid.uuid4().hex
    logger.error("stream %s failed", request, exc_info=error)
    return HeadwaterError("internal error", hint="The server's log has the reason.", request_id=request)
