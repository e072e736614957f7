"""Errors shared by every layer: each says whose fault it is and, where a person reads it, what to do.

`SpesError` is the common root. Programs print `str(error)` as one line and exit with `error.exit_code`.
"""

from __future__ import annotations

DETAIL_CHARACTERS_MAX = 500
"""More of what another peer wrote helps nobody who reads an error."""


def printable(text: str, characters_max: int) -> str:
    """Text from outside as part of one line on a terminal: no control characters, and not too long."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[: characters_max + 1])
    return shown if len(shown) <= characters_max else shown[: characters_max - 3] + "..."


class SpesError(Exception):
    """Root of all errors raised on purpose by this project."""

    exit_code = 1


class UserError(SpesError):
    """A flag, a file or an environment that the person at this machine can correct."""

    exit_code = 2


class DiskFullError(UserError):
    """No room on this machine's disk: what failed may be tried again, for somebody may be making room."""


class SchemaError(UserError):
    """A value in a record or a TOML file that the schema does not allow.

    `path` is the dotted key, `value` what was found, `expected` the allowed range in words.
    """

    def __init__(self, path: str, value: object, expected: str) -> None:
        self.path = path
        self.value = value
        self.expected = expected
        try:
            shown = repr(value)
        except RecursionError:  # lists in lists in lists: only an attacker writes that
            shown = f"a deeply nested {type(value).__name__}"
        where = printable(path, 200) or "record"
        super().__init__(f"{where} = {printable(shown, 80)}: expected {expected}")


class RemoteError(SpesError):
    """Another peer broke the protocol: its bytes are refused and it is named.

    `check` is the name of the step of the ladder (SPEC 7) that failed; `peer` its peer id where known. `detail` may
    hold words of that peer, so it is kept short and printable.
    """

    def __init__(self, check: str, detail: str, peer: str = "") -> None:
        self.check = check
        self.detail = printable(detail, DETAIL_CHARACTERS_MAX)
        self.peer = peer
        who = f" from {peer}" if peer else ""
        super().__init__(f"{check}{who}: {self.detail}")


class IntegrityError(SpesError):
    """Something stored here or in a log no longer is what its digest or signature says.

    `where` names the file or row, `check` the check that failed.
    """

    def __init__(self, check: str, where: str, detail: str) -> None:
        self.check = check
        self.where = where
        self.detail = detail
        super().__init__(f"{check} failed for {where}: {detail}")


class NetworkError(SpesError):
    """No answer, no connection, or a deadline passed; trying again later may help."""

    exit_code = 3
