"""Other people's systems, connected: each in a package of its own, imported where it is used."""

__all__: list[str] = []
