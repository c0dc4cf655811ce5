"""Engines behind HTTP: a side-car that stands beside an engine, and its client."""

__all__: list[str] = []
