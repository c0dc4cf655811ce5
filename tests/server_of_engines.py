"""What the process does at its start that engines are forked from; imported by it alone."""

import ctypes
import importlib
import os
import signal
from contextlib import suppress

_PR_SET_PDEATHSIG = 1

# Its children hold the pipe by whose end it notices that nobody is left, and SGLang's end with it:
# it goes with the run that started it, also with one that is killed.
ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
# A process of SGLang that fails sends it to its parent, which is no launcher here. That it ended is
# noticed without.
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL))
with suppress(ImportError):  # engines name their processes by it
    # It looks for its place, which is not found once the environment has been replaced.
    importlib.import_module("setproctitle").getproctitle()
