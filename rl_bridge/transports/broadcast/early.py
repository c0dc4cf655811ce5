"""Values of a rendezvous that come before this side knows that it takes part."""

__all__ = ["EarlyValues"]

# Each of N members has one value, of 160 + 8 N bytes: this is more than those of 2,000.
_MAX_NBYTES = 64 << 20


class EarlyValues:
    """Keeps those of the newest group, however many members it has: groups are numbered upwards."""

    def __init__(self) -> None:
        """Start empty."""
        self._group = 0
        self._values: dict[str, bytes] = {}
        self._nbytes = 0

    def add(self, group: int, key: str, value: bytes) -> None:
        """Keep a value, unless its group is older than another one's.

        What a publisher sends without end is dropped: the rendezvous then ends at its deadline.
        """
        if group > self._group:
            self._group, self._values, self._nbytes = group, {}, 0
        before = self._values.get(key, b"")
        nbytes = self._nbytes + len(key) + len(value) - len(before)
        if group == self._group and nbytes <= _MAX_NBYTES:
            self._values[key], self._nbytes = value, nbytes

    def take(self, group: int) -> dict[str, bytes]:
        """Give those of a group that begins now, and forget them."""
        found = self._values if group == self._group else {}
        self._values, self._nbytes = {}, 0
        return found
