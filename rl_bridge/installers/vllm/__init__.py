"""Engine side of vLLM: from a verified update into a model that vLLM built and goes on serving."""

__all__: list[str] = []
