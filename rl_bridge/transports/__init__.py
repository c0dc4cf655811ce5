"""How bytes travel: the seam, the registry, one module each."""

__all__: list[str] = []
