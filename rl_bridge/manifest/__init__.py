"""What a version consists of: model, canonical JSON, dtypes, digest, layout. No torch here."""

__all__: list[str] = []
