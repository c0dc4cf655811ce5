"""Engine side: how an imported update gets into an engine, out of it again, and is proven."""

__all__: list[str] = []
