"""Where bytes lie: sealed segments, slots, leases, mappings, and the one pass that copies and digests."""

__all__: list[str] = []
