"""`spes-bootstrap`: keep a door to a run open. Prints the line that volunteers paste.

It follows the ledger and answers with manifest, ledger and addresses; with --archive it keeps blobs and states too.
With --start-key it opens the run by itself once enough claims are there. It checks itself every hour, and serves
metrics with --metrics. Nothing depends on it once peers know each other.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spes_client.ui import EXIT_CODES, Parser, dir_flag, flag, home, rate_flags, run_program, whole_number
from spes_p2p.net.limits import UNLIMITED, relay_rate
from spes_p2p.net.relayed import RelayQuotas
from spes_protocols.errors import UserError

if TYPE_CHECKING:
    from spes_p2p.peer.options import PeerOptions

_QUOTAS = RelayQuotas()


def build_parser() -> Parser:
    """The command line of `spes-bootstrap`."""
    parser = Parser(
        prog="spes-bootstrap",
        description="Keep a door to a run open: tell volunteers of each other, relay for those behind NAT.",
        epilog=EXIT_CODES,
    )
    flag(parser, "--manifest", metavar="FILE", help="the signed manifest of the run, from `spes run sign`")
    flag(
        parser,
        "--genesis",
        metavar="FILE",
        help="the first state of a run that begins from one, to serve it (default: beside the manifest)",
    )
    flag(
        parser,
        "--peer",
        action="append",
        metavar="ADDR",
        help="another bootstrap or volunteer of the run; may be repeated",
    )
    dir_flag(parser)
    flag(
        parser,
        "--listen",
        action="append",
        metavar="ADDR",
        help="multiaddr to listen on (default /ip4/0.0.0.0/tcp/4001); may be repeated",
    )
    flag(
        parser,
        "--announce",
        action="append",
        metavar="ADDR",
        help="multiaddr to tell others instead of the found ones; may be repeated",
    )
    rate_flags(parser)
    _relay_flags(parser)
    flag(parser, "--start-key", metavar="FILE", help="key that starts the run once min_peers claims are there")
    flag(parser, "--archive", action="store_true", help="keep every blob of the run, and states to start from")
    flag(
        parser,
        "--disk",
        type=whole_number(1, 1_000_000),
        default=100,
        metavar="GIB",
        help="disk for states of an archive (default 100)",
    )
    flag(
        parser,
        "--metrics",
        metavar="HOST:PORT",
        help="serve metrics for Prometheus over HTTP here; a port alone is on loopback (default: none)",
    )
    return parser


def _relay_flags(parser: Parser) -> None:
    """What each peer may have at this relay."""
    flag(
        parser,
        "--relay-rate",
        type=relay_rate,
        default=_QUOTAS.rate,
        metavar="RATE",
        help="what each peer may send in bulk through this relay; peers keep to it (default 10mbit; none: no limit)",
    )
    flag(
        parser,
        "--relay-circuits",
        type=whole_number(1, 4096),
        default=_QUOTAS.circuits,
        metavar="N",
        help="relayed connections that one peer may have here; more are refused (default 64)",
    )
    flag(
        parser,
        "--relay-data",
        type=whole_number(1, 1_000_000),
        default=_QUOTAS.bytes_max // 2**30,
        metavar="GIB",
        help="a relayed connection is cut when it has carried so much one way (default 4)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `spes-bootstrap`."""
    return run_program(lambda: _bootstrap(build_parser().parse_args(sys.argv[1:] if argv is None else argv)))


def _bootstrap(args: argparse.Namespace) -> int:
    from spes_p2p.crypto.keys import Identity
    from spes_p2p.peer.exporter import listen_address
    from spes_p2p.peer.options import GIB, PeerOptions

    start_key = Path(args.start_key) if args.start_key else None
    starter = Identity.load(start_key).peer_id if start_key is not None else None  # now, not when the run could start
    options = PeerOptions(
        home=home(args),
        peers=tuple(args.peer or ()),
        listen=tuple(args.listen or ("/ip4/0.0.0.0/tcp/4001",)),
        announce=tuple(args.announce or ()),
        role="archive" if args.archive else "bootstrap",
        trains=False,
        relay=True,
        relay_quotas=RelayQuotas(
            rate=args.relay_rate, circuits=int(args.relay_circuits), bytes_max=int(args.relay_data) * GIB
        ),
        max_up=args.max_up or UNLIMITED,
        max_down=args.max_down or UNLIMITED,
        disk_bytes_max=int(args.disk) * GIB,
        start_key=start_key,
    )
    manifest_path, genesis_path = (Path(text) if text else None for text in (args.manifest, args.genesis))
    if args.metrics:
        listen_address(args.metrics)  # now, not when the network is up
    asyncio.run(_run(options, manifest_path, genesis_path, starter, args.metrics))
    return 0


async def _run(
    options: PeerOptions,
    manifest_path: Path | None,
    genesis_path: Path | None,
    starter: str | None,
    metrics: str | None,
) -> None:
    from spes_p2p.peer.exporter import background, serving
    from spes_p2p.peer.program import open_peer, paste_line, run_until_done
    from spes_p2p.peer.selfcheck import SelfCheck

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    async with open_peer(options, manifest_path, say, genesis_path=genesis_path) as (peer, reached):
        organizer = peer.manifest.organizer
        if starter is not None and starter not in (*organizer.keys, *organizer.start_keys):
            raise UserError(
                f"the run does not let {starter} start it: give one of its organizer's keys with --start-key, or one "
                "that organizer.start_keys named when the manifest was signed"
            )
        print("volunteers join with:")
        for address in await peer.transport.addresses():
            print(f"  {paste_line(address, peer.run_dir.run_id)}", flush=True)
        checks = SelfCheck(peer, say)
        async with serving(peer, metrics, say, checks), background(checks.run()):
            await run_until_done(peer, reached, say)
    print("stopped")


if __name__ == "__main__":
    sys.exit(main())
