"""`spes-join`: join a run and train, with a live view on a terminal and plain lines elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spes_client.machine import GPUS_MAX
from spes_client.ui import EXIT_CODES, Parser, dir_flag, flag, home, one_of, rate_flags, run_program, whole_number
from spes_p2p.core.engine import FROZEN, GRADIENTS, MOMENTS
from spes_p2p.net.limits import UNLIMITED

if TYPE_CHECKING:
    from spes_p2p.peer.options import PeerOptions
    from spes_p2p.peer.peer import Peer

_VIEW_SECONDS = 0.5


def build_parser() -> Parser:
    """The command line of `spes-join`."""
    parser = Parser(
        prog="spes-join",
        description="Join a training run and train a part of its model on this machine.",
        epilog=EXIT_CODES + "\nCtrl-C leaves cleanly after the round; a second one leaves at once.",
    )
    flag(
        parser, "--peer", action="append", metavar="ADDR",
        help="address of any peer of the run, bootstrap or volunteer; may be repeated",
    )  # fmt: skip
    dir_flag(parser)
    flag(
        parser,
        "--groups",
        metavar="N",
        type=whole_number(0, 1024),
        help="expert groups to own (default: as many as the run allows and fit; 0: stand by)",
    )
    _network_flags(parser)
    _machine_flags(parser)
    flag(parser, "--archive", action="store_true", help="keep every blob of the run for replay")
    flag(parser, "--rounds", type=whole_number(1, 2**40), metavar="N", help="stop once the run has finished N rounds")
    flag(parser, "--plain", action="store_true", help="plain lines instead of the live view")
    return parser


def _network_flags(parser: Parser) -> None:
    flag(
        parser,
        "--listen",
        action="append",
        metavar="ADDR",
        help="multiaddr to listen on (default /ip4/0.0.0.0/tcp/0, a free port); may be repeated",
    )
    flag(
        parser,
        "--announce",
        action="append",
        metavar="ADDR",
        help="multiaddr to tell others instead of the found ones; may be repeated",
    )
    flag(
        parser,
        "--relay",
        action="append",
        metavar="ADDR",
        help="relay to be reachable through, for machines behind NAT; may be repeated",
    )
    flag(parser, "--no-port-map", action="store_true", help="do not ask the router to pass a port on (UPnP, NAT-PMP)")
    rate_flags(parser)
    flag(
        parser,
        "--metrics",
        metavar="HOST:PORT",
        help="serve metrics for Prometheus over HTTP here; a port alone is on loopback (default: none)",
    )


def _machine_flags(parser: Parser) -> None:
    flag(
        parser,
        "--device",
        type=one_of("auto", "cpu", "cuda"),
        default="auto",
        help="where to train: auto (a GPU if there is one), cpu or cuda",
    )
    flag(
        parser,
        "--gpus",
        type=whole_number(1, GPUS_MAX),
        metavar="N",
        help="GPUs of this machine to train on together, as one peer (default 1; with --device cpu: processes)",
    )
    flag(
        parser,
        "--threads",
        type=whole_number(1, 1024),
        default=max(1, (os.cpu_count() or 2) // 2),
        metavar="N",
        help="CPU threads of the trainer (default: half the cores)",
    )
    flag(
        parser,
        "--micro-batch",
        type=whole_number(1, 65536),
        metavar="N",
        help="sequences at a time on the device (default: as many as fit)",
    )
    _engine_flags(parser)
    flag(
        parser,
        "--allow-source",
        action="append",
        metavar="PREFIX",
        help="let the run read data under this path or URL; may be repeated",
    )
    flag(
        parser,
        "--disk",
        type=whole_number(1, 1_000_000),
        default=100,
        metavar="GIB",
        help="disk to use for blobs and states (default 100)",
    )
    flag(
        parser,
        "--cache",
        type=whole_number(1, 1_000_000),
        default=20,
        metavar="GIB",
        help="disk to use for training data (default 20)",
    )


def _engine_flags(parser: Parser) -> None:
    flag(
        parser,
        "--frozen",
        type=one_of(*FROZEN),
        metavar="FORM",
        help="form of experts that others own: fp32, bf16 or int8, the smallest (default: bf16 on a GPU, else fp32)",
    )
    flag(
        parser, "--moments", type=one_of(*MOMENTS), metavar="FORM",
        help="form of AdamW's moments: fp32 or int8 (default fp32)",
    )  # fmt: skip
    flag(
        parser, "--gradients", type=one_of(*GRADIENTS), metavar="FORM",
        help="form of gradients: fp32 or bf16 (default fp32)",
    )  # fmt: skip
    flag(parser, "--recompute", action="store_true", help="recompute activations: less memory, a third more time")
    flag(parser, "--compile", action="store_true", help="let torch compile the layers (needs a C++ compiler)")
    flag(
        parser, "--grouped", action="store_true",
        help="frozen experts of a layer as one product, on GPUs of the Hopper and Blackwell kind",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `spes-join`."""
    return run_program(lambda: _join(build_parser().parse_args(sys.argv[1:] if argv is None else argv)))


def options_of(args: argparse.Namespace) -> PeerOptions:
    """The peer's options from the command line."""
    from spes_p2p.core.choice import Wish
    from spes_p2p.peer.options import GIB, PeerOptions
    from spes_p2p.peer.trainer_link import TrainerOptions

    trainer = TrainerOptions(
        threads=int(args.threads),
        devices=int(args.gpus or 1),
        device=args.device,
        engine=Wish(
            groups=None if args.groups is None else int(args.groups),
            frozen=args.frozen,
            moments=args.moments,
            gradients=args.gradients,
            recompute=True if args.recompute else None,
            micro_batch=None if args.micro_batch is None else int(args.micro_batch),
            compile=args.compile,
            grouped=args.grouped,
        ),
        allow_sources=tuple(args.allow_source or ()),
        cache_gib=int(args.cache),
    )
    return PeerOptions(
        home=home(args),
        peers=tuple(args.peer or ()),
        listen=tuple(args.listen or ("/ip4/0.0.0.0/tcp/0",)),
        announce=tuple(args.announce or ()),
        relays=tuple(args.relay or ()),
        port_map=not args.no_port_map,
        max_up=args.max_up or UNLIMITED,
        max_down=args.max_down or UNLIMITED,
        role="archive" if args.archive else "volunteer",
        groups=None if args.groups is None else int(args.groups),
        disk_bytes_max=int(args.disk) * GIB,
        rounds_max=None if args.rounds is None else int(args.rounds),
        trainer=trainer,
    )


def _join(args: argparse.Namespace) -> int:
    from spes_p2p.peer.exporter import listen_address

    options = options_of(args)
    if args.metrics:
        listen_address(args.metrics)  # now, not when the network is up
    live = sys.stdout.isatty() and not args.plain
    asyncio.run(_run(options, live, args.metrics))
    return 0


async def _run(options: PeerOptions, live: bool, metrics: str | None) -> None:
    from spes_client.fitting import fit
    from spes_p2p.peer.exporter import serving
    from spes_p2p.peer.program import open_peer, run_until_done

    view = _View(live)
    async with (
        open_peer(options, None, view.say, fit=fit) as (peer, reached),
        serving(peer, metrics, view.say),
    ):
        view.show(peer)
        try:
            await run_until_done(peer, reached, view.say)
        finally:
            await view.close()
    print("left the run")


class _View:
    """Lines until the peer is there, then the live view; or lines all the way."""

    def __init__(self, live: bool) -> None:
        self._live = live
        self._task: asyncio.Task[None] | None = None

    def say(self, line: str) -> None:
        """One line for the person at the machine, with the time."""
        if self._task is None or not self._live:
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def show(self, peer: Peer) -> None:
        """Begin the live view, if there is a terminal for it."""
        if self._live:
            self._task = asyncio.create_task(self._draw(peer))

    async def close(self) -> None:
        """Leave the last picture on the screen."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _draw(self, peer: Peer) -> None:
        from rich.console import Console
        from rich.live import Live

        from spes_client.view import render

        console = Console()
        with Live(console=console, auto_refresh=False, screen=False) as live:
            while True:
                picture = render(await peer.status(), width=console.width, height=console.height)
                live.update(picture, refresh=True)
                await asyncio.sleep(_VIEW_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
