"""Engine side of SGLang: from a verified update into a model that SGLang built and serves."""

__all__: list[str] = []
