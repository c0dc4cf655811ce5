"""Where bytes lie: segments, slots, leases, mappings, and the pass that copies and digests."""

__all__: list[str] = []
