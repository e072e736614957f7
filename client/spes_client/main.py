"""`spes`: the command of organizers and volunteers. Parses, calls one function, turns failures into one line.

Each module named here adds its verbs with `register(subparsers)` and imports what is heavy only when a verb runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from spes_client import (
    bench,
    checkpoints,
    control_commands,
    demo,
    doctor,
    events,
    keys_commands,
    lab,
    plan,
    repair,
    run_commands,
)
from spes_client.ui import EXIT_CODES, Parser, run_program

_COMMANDS = (
    plan, run_commands, keys_commands, control_commands, doctor, events, repair, checkpoints, bench, lab, demo,
)  # fmt: skip


def build_parser() -> Parser:
    """The whole command line; each verb leaves its function in `handler`: arguments in, exit code out."""
    parser = Parser(
        prog="spes",
        description="Describe, sign and steer runs of SPES, and watch the peer on this machine.",
        epilog=EXIT_CODES + "\nSPES_DEBUG=1 shows the traceback of an error.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    for module in _COMMANDS:
        module.register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `spes`."""
    return run_program(lambda: _dispatch(sys.argv[1:] if argv is None else argv))


def _dispatch(argv: Sequence[str]) -> int:
    parser = build_parser()
    args: argparse.Namespace = parser.parse_args(argv)
    if args.version:
        from spes_p2p import __version__

        print(f"spes {__version__}")
        return 0
    if "handler" not in args:
        parser.error("no command given")
    code: int = args.handler(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
