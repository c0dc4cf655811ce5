"""SGLang: its plugin, what runs in its scheduler, and the executor's adapter around an engine."""

__all__: list[str] = []
