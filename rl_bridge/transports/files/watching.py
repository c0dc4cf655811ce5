"""Waiting for new versions: `watch` looks every so often, and when the kernel tells of a change.

The kernel (inotify, through the package ``watchfiles``) tells of changes that are made on this
machine. It is not told of what another machine writes to a network's file system: there a version
is seen at the next look.
"""

import importlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl_bridge.errors import WeightBridgeUnavailableError
from rl_bridge.manifest.model import WeightUpdateManifest
from rl_bridge.transports.files.store import MARKER

__all__ = ["watch"]

_LOG = logging.getLogger(__name__)

_TICK_S = 0.1
# After a change it looks at each tick for so long: a version comes in several changes, and those in
# a directory that was made just now may be missed.
_BUSY_S = 2.0


def watch(
    newest: Callable[[], WeightUpdateManifest | None],
    directory: Path | None,
    *,
    timeout_s: float,
    every_s: float,
) -> Iterator[WeightUpdateManifest]:
    """Yield the newest version, and then each one that takes its place.

    A version that was yielded is not yielded again, nor an older one of its publisher: it becomes
    the newest where the version after it is withdrawn.

    A look that fails is logged once one succeeded: a trainer's file system may come back. The first
    one raises, since it may as well be the wrong place.

    Args:
        newest: looks, and gives the newest version.
        directory: where the changes are made, if there is one.
        timeout_s: ends after so long without anything new.
        every_s: the longest time between two looks.

    Raises:
        WeightBridgeUnavailableError: the first look failed, or the time is over, and the last one
            did.

    """
    seen: set[str] = set()
    last: WeightUpdateManifest | None = None
    until = time.monotonic() + timeout_s
    bell: _Told | None = None
    has_looked = is_told = False
    try:
        while True:
            found, failure = None, None
            try:
                found = newest()
            except WeightBridgeUnavailableError as error:
                if not has_looked:
                    raise
                _LOG.warning("looking for new versions failed, and is tried again: %s", error)
                failure = error
            has_looked = True
            if found is not None and found.update_id not in seen and _is_newer(found, last):
                seen.add(found.update_id)
                last = found
                yield found
                until = time.monotonic() + timeout_s
            left_s = until - time.monotonic()
            if left_s <= 0:
                if failure is not None:
                    raise failure
                return
            if not is_told:  # and then it looks again: at what came before changes were told
                bell, is_told = _bell(directory, every_s), True
            elif bell is None:
                time.sleep(min(every_s, left_s))
            else:
                bell.wait(left_s)
    finally:
        if bell is not None:
            bell.close()


def _is_newer(found: WeightUpdateManifest, last: WeightUpdateManifest | None) -> bool:
    """Whether it is another publisher's, or above the last one."""
    if last is None or found.publisher_id != last.publisher_id:
        return True
    return found.weight_version > last.weight_version


def _bell(directory: Path | None, every_s: float) -> "_Told | None":
    """What tells of changes; None: nothing does."""
    if directory is not None and directory.exists():
        try:
            return _Told(importlib.import_module("watchfiles"), directory, every_s)
        except ImportError:
            _LOG.debug("watchfiles is not installed: looking every %s s", every_s)
        except OSError as error:  # such as the limit of inotify's watches
            _LOG.warning("changes are not told of (%s): looking every %s s", error, every_s)
    return None


class _Told:
    def __init__(self, watchfiles: Any, directory: Path, every_s: float) -> None:
        self._directory, self._every_s = directory.resolve(), every_s
        self._busy_until = 0.0
        # Unfiltered: then each step ends, whatever goes on there.
        self._changes: Any = watchfiles.watch(
            directory,
            watch_filter=None,
            debounce=round(_TICK_S * 1000),
            step=10,
            rust_timeout=round(_TICK_S * 1000),
            yield_on_timeout=True,
        )
        next(self._changes)  # from here on changes are told

    def wait(self, left_s: float) -> None:
        until = time.monotonic() + min(self._every_s, left_s)
        while (left_s := until - time.monotonic()) > 0:
            if left_s < _TICK_S:
                time.sleep(left_s)
                return
            if any(self._is_of_a_version(Path(path)) for _, path in next(self._changes)):
                self._busy_until = time.monotonic() + _BUSY_S
                return
            if time.monotonic() < self._busy_until:
                return

    def _is_of_a_version(self, path: Path) -> bool:
        return path.name == MARKER or path.parent == self._directory

    def close(self) -> None:
        self._changes.close()
