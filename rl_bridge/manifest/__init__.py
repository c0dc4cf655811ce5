"""What a version consists of: model, canonical JSON, dtype table, digest, layout, compare. No torch."""

__all__: list[str] = []
