"""Virtual memory of a device: its driver, and an owner for everything that the driver gives out."""

__all__: list[str] = []
