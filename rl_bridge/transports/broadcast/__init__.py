"""``broadcast``: one trainer's versions to many engines, on this machine or on others."""

__all__: list[str] = []
