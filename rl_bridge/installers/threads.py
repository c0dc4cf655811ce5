"""How many threads an adapter may take."""

__all__ = ["checked_threads"]


def checked_threads(num_threads: int | None) -> int | None:
    """The number as it was given; None stands for the usable cores.

    Raises:
        ValueError: it is no number of threads.

    """
    if num_threads is None or (type(num_threads) is int and num_threads >= 1):
        return num_threads
    msg = f"num_threads {num_threads!r}: expected an int of 1 or more, or None for the usable cores"
    raise ValueError(msg)
