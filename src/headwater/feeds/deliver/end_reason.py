"""Why a stream ended, for the transports that report it."""

from __future__ import annotations

import logging
import uuid

import msgspec

from headwater.errors import HeadwaterError

logger = logging.getLogger("headwater.feeds")


CLOSED, COMPLETE, STOPPING, RESNAPSHOT_REQUIRED = "closed", "complete", "stopping", "resnapshot_required"


class EndReason(msgspec.Struct, frozen=True):
    """The code and message with which a stream ended."""

    code: str  # one of the above, or the code of an error
    message: str
    error: HeadwaterError | None = None  # the error, where one ended the stream


def known(error: Exception) -> HeadwaterError:
    """Return `error` as the reader may see it: an unexpected exception is logged and becomes an internal error."""
    if isinstance(error, HeadwaterError):
        return error
    request = uuid.uuid4().hex
    logger.error("stream %s failed", request, exc_info=error)
    return HeadwaterError("internal error", hint="The server's log has the reason.", request_id=request)
