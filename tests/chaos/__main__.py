"""Run the real programs under random faults, and say what became of the run.

Exit code 1 if anything was found that must not be; Ctrl-C ends the faults, and the run is judged all the same.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import cage


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, go into the cage, run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="how long faults go on (default 3)")
    parser.add_argument("--peers", type=int, default=4, choices=range(3, 9), help="volunteers (default 4)")
    parser.add_argument("--lag", type=int, choices=(0, 1), default=0, help="1: peers train ahead of the agreement")
    parser.add_argument("--seed", type=int, help="of the faults (default: by chance, and printed)")
    parser.add_argument("--calm-seconds", type=float, default=60.0, help="undisturbed time that is compared with")
    parser.add_argument(
        "--kill-seconds", type=float, nargs=2, default=(12.0, 15.0), metavar=("LEAST", "MOST"), help="between two kills"
    )
    parser.add_argument("--dir", type=Path, help="where homes, output and account go (default: a temporary one)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with the swarm and the account of a run")
    parser.add_argument("--loopback", action="store_true", help="no namespaces: leaves out cut lines and full disks")
    options = parser.parse_args(argv)
    reason = "--loopback" if options.loopback else cage.obstacle()
    if reason:
        print(f"without cut lines and full disks: {reason}", flush=True)
    else:
        cage.enter()
    return _run(options, caged=not reason)


def _run(options: argparse.Namespace, *, caged: bool) -> int:
    from tests.chaos.account import Account
    from tests.chaos.run import Run

    directory = options.resume or options.dir or Path(tempfile.mkdtemp(prefix="spes-chaos-run-"))
    path = directory / "account.json"
    if options.resume is not None:
        account = Account.load(path)
        account.caged = caged
    else:
        seed = secrets.randbelow(10**6) if options.seed is None else options.seed
        account = Account(peers=options.peers, seed=seed, caged=caged, lag=options.lag)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(f"seed {account.seed}, {account.peers} peers, in {directory}", flush=True)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} {text}", flush=True)

    run = Run(directory, account, stop, say, caged=caged)
    run.play(options.minutes * 60, options.calm_seconds, tuple(options.kill_seconds))
    account.save(path)
    print(account.table())
    for problem in account.problems:
        print(f"PROBLEM: {problem}")
    if account.problems or stop.is_set() or options.dir or options.resume:
        print(f"go on with: python -m tests.chaos --resume {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    print(account.last_line(), flush=True)
    return 1 if account.problems else 0


if __name__ == "__main__":
    sys.exit(main())
