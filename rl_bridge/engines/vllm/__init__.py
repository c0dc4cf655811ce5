"""vLLM: its plugin, what runs in its workers, and the executor's adapter around an engine."""

__all__: list[str] = []
