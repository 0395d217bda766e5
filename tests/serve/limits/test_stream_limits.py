"""The limit of streams per client: counted per address, and released."""

import pytest

from headwater.errors import LimitExceeded
from headwater.serve.limits.stream_limits import StreamCounts


def test_client_over_its_stream_limit_is_refused() -> None:
    places = StreamCounts(2)
    with places.take("a"), places.take("a"):
        with pytest.raises(LimitExceeded) as refused, places.take("a"):
            pass
        assert "from a" in refused.value.message and "Close one" in refused.value.hint
        with places.take("b"):
            pass
    with places.take("a"), places.take("a"):
        pass


def test_addresses_of_one_ipv6_network_share_the_limit() -> None:
    places = StreamCounts(2)
    with places.take("2001:db8:1:2::1"), places.take("2001:db8:1:2:ffff::9"):
        with pytest.raises(LimitExceeded), places.take("2001:db8:1:2::3"):
            pass
        with places.take("2001:db8:1:3::1"), places.take("192.0.2.1"):
            pass
    mapped = places.take("::ffff:192.0.2.1")
    with mapped, places.take("192.0.2.1"), pytest.raises(LimitExceeded), places.take("192.0.2.1"):
        pass


def test_stream_is_uncounted_after_an_error() -> None:
    places = StreamCounts(1)
    with pytest.raises(RuntimeError), places.take("a"):
        raise RuntimeError
    with places.take("a"):
        pass
