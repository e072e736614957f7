"""A network of a test's own, with public addresses: a thread in a new network namespace."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable

import pytest

ADDRESS, OTHER_ADDRESS = "11.0.113.1", "11.0.113.2"
"""Public ones, as the daemon tells nobody of relays in private networks."""

_NEW_NETWORK = 0x40000000


def obstacle() -> str:
    """Why a network of its own cannot be had here; empty if it can."""
    return (
        "" if os.geteuid() == 0 and shutil.which("ip") and shutil.which("iptables") else "needs root, ip and iptables"
    )


def in_network(test: Callable[[], None]) -> None:
    """Run a test where these addresses are this machine's, and what it starts."""
    failed: list[BaseException] = []

    def inside() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
                pytest.skip(f"no network of its own here: {os.strerror(ctypes.get_errno())}")
            for words in (
                "link set lo up",
                f"address add {ADDRESS}/32 dev lo",
                f"address add {OTHER_ADDRESS}/32 dev lo",
            ):
                subprocess.run(["ip", *words.split()], check=True)
            test()
        except BaseException as error:  # also a skip
            failed.append(error)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
