"""Response headers that restrict what browsers do with a response.

A 304 has none of them: a cache keeps those of the stored response (RFC 9111 §4.3.4).
"""

from __future__ import annotations

from headwater.serve.call import Headers

POLICY = b"content-security-policy"
CLOSED = (POLICY, b"default-src 'none'; frame-ancestors 'none'")  # for data, which loads and runs nothing
UNFRAMED = (POLICY, b"frame-ancestors 'none'")  # for a page without a policy of its own
PLAIN: Headers = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
# For responses that a page can embed. Browsers check it only for requests without CORS, such as images and scripts.
UNSHARED = (b"cross-origin-resource-policy", b"same-origin")
SECURE: Headers = [*PLAIN, (b"strict-transport-security", b"max-age=31536000")]
_DATA = [*PLAIN, CLOSED], [*SECURE, CLOSED]


def with_security_headers(headers: Headers, *, tls: bool) -> Headers:
    """Return the headers of a response with the security headers added."""
    for name, value in headers:
        if name == b"content-type" and value.startswith(b"text/html"):
            own = any(name == POLICY for name, _ in headers)
            return [*headers, *(SECURE if tls else PLAIN), *(() if own else (UNFRAMED,))]
    return headers + _DATA[tls]
