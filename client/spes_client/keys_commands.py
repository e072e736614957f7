"""`spes keys`: make, show, back up and restore the key that is a peer's, or an organizer's, identity.

The key is what others know a peer by; who loses an organizer's key can steer its run no more. A backup is a text file
encrypted with a passphrase.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client import ui
from spes_protocols.errors import UserError

if TYPE_CHECKING:
    from spes_p2p.crypto.keys import Identity

_BACKUP_BYTES_MAX = 64 * 1024
_NOTE_BYTES_MAX = 200
_ENVIRONMENT = "SPES_PASSPHRASE"


def register(subparsers: Any) -> None:
    """Add `keys` and its verbs."""
    keys = subparsers.add_parser(
        "keys", help="make, show, back up and restore a key", description=__doc__, epilog=ui.EXIT_CODES
    )
    keys.set_defaults(handler=lambda args: keys.error("no verb given"))
    verbs = keys.add_subparsers(metavar="VERB")
    new = verbs.add_parser("new", help="make a key, such as an organizer's; spes-join makes its own")
    _key_flags(new)
    new.set_defaults(handler=_new)
    show = verbs.add_parser("show", help="show the peer id and fingerprint of a key")
    _key_flags(show)
    show.set_defaults(handler=_show)
    backup = verbs.add_parser("backup", help="write a key to a text file, encrypted with a passphrase")
    backup.add_argument("file", type=Path, metavar="FILE", help="backup to write")
    _key_flags(backup)
    _passphrase_help(backup)
    backup.set_defaults(handler=_backup)
    restore = verbs.add_parser("restore", help="bring a key back from its backup")
    restore.add_argument("file", type=Path, metavar="FILE", help="backup that `spes keys backup` wrote")
    _key_flags(restore)
    _passphrase_help(restore)
    restore.set_defaults(handler=_restore)


def _key_flags(parser: argparse.ArgumentParser) -> None:
    ui.flag(parser, "--key", metavar="FILE", default="", help="the key file (default: `identity` in --dir)")
    ui.dir_flag(parser)
    ui.json_flag(parser)


def _passphrase_help(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"The passphrase is asked for on the terminal; scripts set {_ENVIRONMENT}."


def _new(args: argparse.Namespace) -> int:
    from spes_p2p.crypto.keys import Identity

    identity = Identity.generate()
    identity.save(ui.key_path(args))
    return _print(args, identity, "made")


def _show(args: argparse.Namespace) -> int:
    return _print(args, ui.load_identity(args), "file")


def _backup(args: argparse.Namespace) -> int:
    from spes_p2p.crypto.keys import backup

    identity = ui.load_identity(args)
    if args.file.exists():
        raise UserError(f"{args.file} exists; name a new file for the backup")
    ui.check_writable(args.file)
    ui.write_file(args.file, backup(identity, _passphrase(repeat=True)))
    args.file.chmod(0o600)  # encrypted, and still nobody else's business
    _note_backup(args, identity)
    return _print(args, identity, "backed up", args.file)


def _restore(args: argparse.Namespace) -> int:
    from spes_p2p.crypto.keys import restore

    path = ui.key_path(args)
    try:
        with args.file.open("rb") as file:
            data = file.read(_BACKUP_BYTES_MAX)
    except FileNotFoundError:
        raise UserError(f"no backup at {args.file}; name the file that `spes keys backup` wrote") from None
    if path.exists():
        raise UserError(f"{path} holds a key already; move it away first, or restore to another place with --key FILE")
    identity = restore(data, _passphrase(repeat=False))
    identity.save(path)
    _note_backup(args, identity)
    return _print(args, identity, "restored")


def backup_note(key: Path) -> Path:
    """Where it is noted that a key has a backup: beside it, a line with the day and the fingerprint."""
    return key.with_name(f"{key.name}.backup-note")


def read_backup_note(key: Path) -> tuple[str, str] | None:
    """(day, fingerprint) of the last backup of a key, None if none is noted. Raises `OSError`."""
    try:
        with backup_note(key).open("rb") as file:
            text = file.read(_NOTE_BYTES_MAX).decode(errors="replace")
    except FileNotFoundError:
        return None
    day, _, fingerprint = ui.one_line(text).partition(" ")
    return day, fingerprint


def _note_backup(args: argparse.Namespace, identity: Identity) -> None:
    """For `spes doctor`. The backup is good without it."""
    from spes_p2p.store.files import atomic_write

    line = f"{time.strftime('%Y-%m-%d', time.gmtime())} {ui.fingerprint(identity.peer_id)}\n"
    with contextlib.suppress(OSError):
        atomic_write(backup_note(ui.key_path(args)), line.encode())


def _passphrase(*, repeat: bool) -> str:
    """The passphrase from the environment or the terminal; `repeat` asks twice. Raises `UserError` without either."""
    given = os.environ.get(_ENVIRONMENT)
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise UserError(f"no terminal to ask for the passphrase on; set {_ENVIRONMENT}")
    passphrase = getpass.getpass("passphrase: ")
    if repeat and getpass.getpass("again: ") != passphrase:
        raise UserError("the two passphrases differ; run the command again")
    return passphrase


def _print(args: argparse.Namespace, identity: Identity, what: str, path: Path | None = None) -> int:
    file = path or ui.key_path(args)
    fingerprint = ui.fingerprint(identity.peer_id)
    if args.json:
        ui.print_json({"peer_id": identity.peer_id, "fingerprint": fingerprint, "file": file})
    else:
        rows = [("peer id", identity.peer_id), ("fingerprint", fingerprint), (what, str(file))]
        ui.print_rich(ui.pairs_table(rows))
    return ui.EXIT_OK
