"""Weight transfer by strategies: config in, sender and receiver out, every sync one transaction.

All chunks of a sync are one update: one manifest, sealed. The requests that go to the engines are
batches of it; an engine serves the update when the last one is installed and proven, or not at all.
"""

__all__: list[str] = []
