"""``nixl``: engines read versions out of the trainer's memory, one-sided, also across machines."""

__all__: list[str] = []
