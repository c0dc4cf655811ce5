"""What an executor is given, looked at when it is made."""

from rl_bridge.bridge.protocols import WeightConsumer

__all__ = ["checked_bridge"]

_VERBS = ("import_update", "acknowledge", "reject", "release")


def checked_bridge(given: object) -> WeightConsumer:
    """The consumer's bridge as it was given.

    Raises:
        TypeError: it is none: the name of a transport, a class, an object that cannot import.

    """
    if isinstance(given, type):
        what, remedy = f"the class {given.__name__}", "Make an object of it"
    elif isinstance(given, str):
        what = f"the str {given!r}"
        remedy = f"Pass make_weight_bridge({given!r}), or weight_transport={given!r} instead"
    elif isinstance(given, WeightConsumer) and all(callable(getattr(given, v)) for v in _VERBS):
        return given
    else:
        lacking = [verb for verb in _VERBS if not callable(getattr(given, verb, None))]
        what = f"a {type(given).__name__}, which has no {' and no '.join(lacking)}"
        remedy = "Pass what make_weight_bridge returned"
    msg = f"weight_bridge: got {what}, expected a consumer's bridge. {remedy}."
    raise TypeError(msg)
