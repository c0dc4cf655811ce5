"""An interrupt between two lines of the library, as Python raises it anywhere."""

import linecache
from types import FrameType
from typing import Any

__all__ = ["InterruptBefore"]


class InterruptBefore:
    """Traces this thread and raises before the `number`-th line of the library, once.

    Counted are lines of files with `within` in their path.
    """

    def __init__(self, number: int, *, within: str = "/rl_bridge/") -> None:
        self._left = number
        self._within = within
        self.struck = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._within not in frame.f_code.co_filename:
            return None
        if event == "line" and not self.struck:
            # Leaving a with block is traced as its line, where Python itself never interrupts; nor
            # does it between the end of a call and the `release` of a `finally` behind it.
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if not line.startswith(("with ", "if taken and taken[0]:", "FORKS.release()")):
                self._left -= 1
                if self._left < 0:
                    self.struck = True
                    raise KeyboardInterrupt
        return self
