"""The peer's log takes what is logged, and a full disk is no reason to write across the terminal."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from spes_p2p.peer.logfile import logging_to

log = logging.getLogger("spes_p2p.a_test")


def test_what_is_logged_stands_in_the_file(tmp_path: Path) -> None:
    with logging_to(tmp_path / "log"):
        log.warning("the line %d", 7)
    log.warning("after it")
    # hivemind, where some other test has imported it, calls the level WARN.
    assert re.search(r" WARN(ING)? spes_p2p\.a_test: the line 7\n\Z", (tmp_path / "log").read_text())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_not_told_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(Path("/dev/full")):
        log.warning("does not fit")
        log.warning("nor does this")
    assert capsys.readouterr().err == ""
