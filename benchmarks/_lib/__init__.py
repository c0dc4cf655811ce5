"""What the benchmark scripts share: payload, processes, lanes, memory and reports."""

__all__: list[str] = []
