"""Options that say where a side listens, and how long it waits."""

import ipaddress
import operator
from functools import lru_cache

__all__ = ["checked_address", "checked_port"]


def checked_address(address: str) -> str:
    """Check that an address is one that a peer can connect to: a literal, never a name.

    A name would be looked up by whoever reads it, and could mean another machine there.

    Raises:
        ValueError: it is not.

    """
    try:
        parsed = _parsed(address)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{address!r} is no IP address. Write it in numbers.") from error
    if parsed.is_unspecified or parsed.is_multicast:
        raise ValueError(f"{address!r} is no machine's address. Name the interface's own.")
    return address


def checked_port(port: object) -> int:
    """Check a port; 0 stands for a free one.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.

    """
    try:
        number = -1 if isinstance(port, bool) else operator.index(port)  # type: ignore[arg-type]  # that is what is tried
    except TypeError as error:
        raise TypeError(f"port={port!r}: expected an int from 0 to 65535.") from error
    if not 0 <= number < 2**16:
        raise ValueError(f"port={port!r}: expected an int from 0 to 65535.")
    return number


# A consumer reads the same few publishers' in every manifest that it gets.
@lru_cache(maxsize=1024)
def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address)
