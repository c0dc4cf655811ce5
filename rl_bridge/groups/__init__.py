"""Update groups: many ranks publish one version, each engine reads its share of it."""

__all__: list[str] = []
