"""Shields: the headers that tell browsers what not to do with an answer.

A 304 goes without: a cache keeps those of the answer that it confirms (RFC 9111 §4.3.4).
"""

from __future__ import annotations

from headwater.serve.call import Headers

POLICY = b"content-security-policy"
CLOSED = (POLICY, b"default-src 'none'; frame-ancestors 'none'")  # for data, which loads and runs nothing
UNFRAMED = (POLICY, b"frame-ancestors 'none'")  # for a page that names no policy of its own
PLAIN: Headers = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
# For what a page can embed. Browsers look at it only where CORS is not asked: for images, scripts and the like.
UNSHARED = (b"cross-origin-resource-policy", b"same-origin")
SECURE: Headers = [*PLAIN, (b"strict-transport-security", b"max-age=31536000")]
_DATA = [*PLAIN, CLOSED], [*SECURE, CLOSED]


def shielded(headers: Headers, *, tls: bool) -> Headers:
    """`headers` of an answer, and those that guard it."""
    for name, value in headers:
        if name == b"content-type" and value.startswith(b"text/html"):
            own = any(name == POLICY for name, _ in headers)
            return [*headers, *(SECURE if tls else PLAIN), *(() if own else (UNFRAMED,))]
    return headers + _DATA[tls]
