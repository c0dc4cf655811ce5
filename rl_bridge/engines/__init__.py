"""Inference engines in processes of their own: vLLM, SGLang, and what every engine needs."""

__all__: list[str] = []
