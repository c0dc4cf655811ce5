"""What may happen to an update: one transition table, the machine, the journal. No torch."""

__all__: list[str] = []
