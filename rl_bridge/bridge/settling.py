"""Letting go of what came before an active version."""

import logging
from collections.abc import Callable, Mapping

__all__ = ["settle"]

_LOG = logging.getLogger(__name__)


def settle(version: int, steps: Mapping[str, Callable[[], object]]) -> None:
    """Take each step, whatever becomes of the others; one that fails is taken once more.

    The version is installed, proven and acknowledged: telling the caller that his update failed
    would be wrong. What could not be let go is said in the log.

    Args:
        version: the active one.
        steps: name -> what to do.

    Raises:
        BaseException: an interrupt, after the last step.

    """
    interrupt: BaseException | None = None
    for name, step in steps.items():
        try:
            _take(step)
        except Exception:  # noqa: BLE001 - logged in full
            _LOG.exception(
                "version %d is active, but the old one was not let go: its %s failed", version, name
            )
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = error
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            del interrupt  # else its traceback would hold this frame, and this frame it


def _take(step: Callable[[], object]) -> None:
    try:
        step()
    except Exception:  # noqa: BLE001 - of the second one
        # What a shortage stopped would hold a slot, and with all of them held there is no next
        # update that could let go of it.
        step()
