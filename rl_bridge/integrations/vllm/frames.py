"""Exceptions that outlive their call must not keep the memory of an update."""

import traceback

__all__ = ["clear_frames"]


def clear_frames(error: BaseException) -> None:
    """Who keeps the log's records must not keep the trainer's slot, by tensors in frames."""
    chain: list[BaseException] = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]
