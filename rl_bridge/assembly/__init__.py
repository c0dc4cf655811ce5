"""Reading a version of several parts: what is wanted, where it lies, how it is assembled."""

__all__: list[str] = []
