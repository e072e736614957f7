"""The peer's log: a file of bounded size for what the program logs, whose terminal may be showing a live view."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import sys
from collections.abc import Iterator
from pathlib import Path

LOG_BYTES_MAX = 8 * 1024 * 1024


class _LogFile(logging.handlers.RotatingFileHandler):
    """A full disk leaves gaps in it: logging's own complaint, a traceback, would go across the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """A record could not be written."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send what the program logs to this file."""
    handler = _LogFile(path, maxBytes=LOG_BYTES_MAX, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        with contextlib.suppress(OSError):  # the last lines do not fit
            handler.close()
