"""Starting a program that must not outlive this process.

launch(["p2pd", ...]) --> [python, launcher, own pid, "p2pd", ...] --exec--> p2pd, killed when this process is gone
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Linux' parent-death signal (prctl 1, SIGKILL) holds even when this process is killed. It has to be set in the child,
# between fork and exec; a `preexec_fn` would run Python in a forked copy of a process with threads, which now and then
# hangs, so this short program sets it and becomes the other one. If we died before it was set, the parent is another
# process by now.
_LAUNCHER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def launch(command: Sequence[str]) -> list[str]:
    """The command that runs `command` (its first word a path) and ends with the thread that starts it, on Linux."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
