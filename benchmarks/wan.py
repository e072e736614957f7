"""Where a round's wall time goes on home lines: four real peers, each behind 110 Mbit/s up, 500 down, 50 ms.

    python benchmarks/wan.py                                four rounds of 240 s of training: 25 minutes; needs root
    python benchmarks/wan.py --lag 1                        with training ahead: 21 minutes
    python benchmarks/wan.py --train-seconds 5 --rounds 1   a try
    python benchmarks/wan.py --train-seconds 5 --slow 0.1   one peer sends at a tenth of the others' rate

With `--slow` the figures of interest are how long that peer's contribution takes to all others, round by round, over
the time that it needs on that peer's line once, its own part. `--faster` shortens both, for a try.

What the lines carry is the `1b` preset's at four nodes, divided by `--scale`: the bytes of a contribution and the rates
of the lines, so that a transfer takes as long as at full size. The round trip is not scaled. The trainers take real
steps of that small model, each followed by a pause, so that a round's training takes `--train-seconds`.

Four peers share this machine's cores for their arithmetic, with a small model; what it takes a peer of the full size
that has a machine of its own is computed (`at_full_size`), and both are shown.

Times are those of the peers' event logs, bytes those of the devices, headers of TCP and Ethernet with them.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from common import machine, new_parser, new_table, show
from emulated.line import Machine, connect

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spes_client.measured import REFERENCE_APPLY_BYTES_PER_SECOND
from spes_client.ui import bytes_text, run_program
from spes_p2p.core.tensors import section_specs
from spes_p2p.delta.codecs import section_bytes, write_section
from spes_p2p.delta.feedback import taken_in
from spes_p2p.model.moe import MoE
from spes_p2p.model.moments import Moments
from spes_p2p.store.events import Life, Line, read_events
from spes_p2p.train.ahead import Copied, copied
from spes_p2p.train.state import Computed
from spes_protocols.errors import UserError
from spes_protocols.manifest import Model
from spes_protocols.messages import SHARED, group_section
from tests.chaos import cage

ROOT = Path(__file__).resolve().parents[1]
PEERS = 4
BITS_UP, BITS_DOWN, ROUND_TRIP_SECONDS = 110e6, 500e6, 0.050
STEPS = 24
LAYERS, EXPERTS = 12, 16
SHARED_SHARE = 0.354
"""Of the full size's contribution: 261 M shared parameters in 4 bits, 226 M owned ones in 8."""

SECTIONS = ((SHARED, "int4"), (group_section(0), "int8"))
STATE_BYTES = 12
"""What the trainer writes for a trained parameter before it publishes: two moments and a residual in fp32."""

TRIES = 3
PATIENCE_SECONDS = 300.0
PHASES = {
    "train": "train: the local steps, paced",
    "encode": "encode, save and sign",
    "transfer": "transfer: others' blobs, from the own header to the last",
    "check": "check the last of them",
    "agree": "agree: to the stored commit, without apply",
    "apply": "apply: the next state and its root",
    "next": "until the next round's training begins",
}
BESIDE = ("transfer", "check", "agree", "apply")
"""What goes on while the next round is trained, where the manifest's `lag` is 1; coding does too, before these."""

OTHER_LAG = "measured with --lag {}"


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of one peer, in seconds; the phases add up to `wall`."""

    wall: float
    phases: dict[str, float]
    contribution_bytes: int
    upload: float
    """From the own header until the last of the others had the own blobs; it runs beside `transfer`."""
    views: float
    """How many views the agreement took: each after the first has cost the waits of the one before."""


def rounds_of(life: Life, lives: Sequence[Life]) -> list[Round]:
    """The whole rounds in one peer's log, from one start of training to the next. `lives`: those of all peers."""
    starts = {
        int(line.fields["round"]): life.seconds(line) for line in reversed(life.lines) if line.event == "training"
    }
    return [
        found
        for number, follows in itertools.pairwise(sorted(starts))
        if (found := _round(life, lives, number, starts[number], starts[follows])) is not None
    ]


def _round(life: Life, lives: Sequence[Life], number: int, begin: float, end: float) -> Round | None:
    """None for a round in which this peer did not contribute, or whose end is not in the log."""
    lines = [line for line in life.lines if begin <= life.seconds(line) <= end]
    trained = _last(lines, "trained", round=number)
    header = _last(lines, "header", round=number)
    applied = _last(lines, "applied", round=number)
    head = _last(lines, "head", round=number + 1)
    if trained is None or header is None or head is None:
        return None
    sent = life.seconds(header)
    # Others' blobs may all be here before the own header is signed.
    came = max([sent, *(life.seconds(line) for line in lines if line.event == "blob_came")])
    checked = max([came, *(life.seconds(line) for line in lines if line.event == "checked")])
    moved = life.seconds(head)
    train = float(trained.fields["seconds"])
    # A peer that hears the others' commit while it applies writes no event of it: that time is in `agree` then.
    apply = float(applied.fields["seconds"]) if applied is not None else 0.0
    taken = [
        other.seconds(line) - sent
        for other in lives
        for line in other.lines
        if line.event == "blob_came" and line.fields["signer"] == life.peer and begin <= other.seconds(line) <= end
    ]
    phases = {
        "train": train,
        "encode": sent - begin - train,
        "transfer": came - sent,
        "check": checked - came,
        "agree": moved - checked - apply,
        "apply": apply,
        "next": end - moved,
    }
    size = int(header.fields["bytes"])
    views = 1.0 + max([0, *(int(line.fields["view"]) for line in lines if line.event == "view")])
    return Round(
        wall=end - begin, phases=phases, contribution_bytes=size, upload=max(taken, default=0.0), views=views
    )  # fmt: skip


def _last(lines: Sequence[Line], event: str, **fields: Any) -> Line | None:
    fitting = (
        line
        for line in reversed(lines)
        if line.event == event and all(line.fields.get(name) == value for name, value in fields.items())
    )
    return next(fitting, None)


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """From the end of one round's training to that of the next, in seconds; what is not training is not hidden."""

    wall: float
    train: float


def cycles_of(life: Life) -> list[Cycle]:
    """Those of one peer's log that belong to rounds that follow one another."""
    done = {int(line.fields["round"]): line for line in life.lines if line.event == "trained"}
    return [
        Cycle(wall=life.seconds(done[late]) - life.seconds(done[early]), train=float(done[late].fields["seconds"]))
        for early, late in itertools.pairwise(sorted(done))
        if late == early + 1
    ]


def mean(rounds: Sequence[Round]) -> Round:
    """Of several rounds and peers. Raises `UserError` if there are none."""
    if not rounds:
        raise UserError("no peer finished a whole round: see the peers' event logs")
    return Round(
        wall=fmean(each.wall for each in rounds),
        phases={phase: fmean(each.phases[phase] for each in rounds) for phase in PHASES},
        contribution_bytes=round(fmean(each.contribution_bytes for each in rounds)),
        upload=fmean(each.upload for each in rounds),
        views=fmean(each.views for each in rounds),
    )


def at_full_size(
    measured: Round, planned: Mapping[str, Any], *, encode_seconds: float, scale: float
) -> dict[str, float]:
    """The phases of a peer of the full size with a machine of its own; train, transfer and agreement as measured.

    `encode`: `encode_seconds` of the small model times the scale, and writing the trainer's state at the rate by which
    `spes plan` counts; `check`: as measured with four peers on these cores, times the scale; `apply`: by `spes plan`.
    """
    saved = STATE_BYTES * planned["parameters_trained"] / REFERENCE_APPLY_BYTES_PER_SECOND
    return measured.phases | {
        "encode": encode_seconds * scale + saved,
        "check": measured.phases["check"] * scale,
        "apply": planned["apply_seconds"],
    }


def overlapped(cycles: Sequence[Cycle], full: Mapping[str, float], *, taking_in: float) -> dict[str, float]:
    """A cycle as measured, and at full size: training, or all that goes on beside it where that is longer.

    `full`: the phases at full size; `taking_in`: seconds for which training rests, at full size. Raises `UserError` if
    there is no cycle.
    """
    if not cycles:
        raise UserError("no peer trained two rounds in turn: see the peers' event logs")
    wall, train = fmean(each.wall for each in cycles), fmean(each.train for each in cycles)
    whole = taking_in + max(train, full["encode"] + sum(full[name] for name in BESIDE))
    return {
        "taking_in_seconds": taking_in,
        "wall_seconds": wall, "train_seconds": train, "utilisation_as_measured": train / wall,
        "full_size_wall_seconds": whole, "utilisation": train / whole,
    }  # fmt: skip


def encode_seconds(model: Model) -> float:
    """CPU time of coding one contribution of this model, the least of three tries."""
    random = np.random.default_rng(0)
    tries = []
    with tempfile.TemporaryDirectory(prefix="spes-benchmark-") as folder:
        for (name, codec), _ in itertools.product(SECTIONS, range(TRIES)):
            specs = section_specs(model, PEERS, name)
            deltas = {spec.name: random.normal(0, 1e-3, spec.shape).astype(np.float32) for spec in specs}
            begun = time.process_time()
            write_section(specs, deltas, codec, Path(folder) / "blob")
            tries.append(time.process_time() - begun)
    return sum(min(tries[first : first + TRIES]) for first in range(0, len(tries), TRIES))


def taking_in_seconds(model: Model) -> float:
    """CPU time for which a trainer of this model rests in a round with overlap, the least of three tries.

    It copies what it trains and the moments, and takes the agreed state in (`spes_p2p/train/trainer.py`).
    """
    moe = MoE(model, PEERS, (0,))
    random = np.random.default_rng(0)
    state = {name: random.normal(0, 0.02, tuple(p.shape)).astype(np.float32) for name, p in moe.named_parameters()}
    moe.load(state)
    moments = {
        name: Moments(steps=1, mean=torch.zeros_like(p), square=torch.zeros_like(p))
        for name, p in moe.trainable().items()
    }
    tries = []
    for _ in range(TRIES):
        begun = time.process_time()
        start = Copied({name: p.detach().numpy() for name, p in moe.trainable().items()})
        copied(moments)
        trained = {name: p.detach().numpy() for name, p in moe.trainable().items()}
        moe.load(
            Computed(
                state,
                lambda name, trained=trained, start=start: (
                    taken_in(trained[name], state[name], start.trained(name)) if name in trained else state[name]
                ),
            )
        )
        tries.append(time.process_time() - begun)
    return min(tries)


def small_model(contribution: float) -> Model:
    """A model whose peers' contributions have about so many bytes, with the full size's share of shared parameters."""
    heads = 8
    shared, owned = contribution * SHARED_SHARE, contribution * (1 - SHARED_SHARE)
    # Attention has 4 d^2 parameters a layer, of half a byte each; an expert 3 d f of one byte.
    hidden = max(32, round((shared / (2 * LAYERS)) ** 0.5 / (2 * heads)) * 2 * heads)
    intermediate = max(8, round(owned / (3 * hidden * LAYERS * EXPERTS / PEERS)))
    return Model(
        vocab_size=257,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        sequence_length=32,
    )


def contribution_bytes(model: Model) -> int:
    """A peer's blobs of one round, as `spes plan` counts them."""
    return sum(section_bytes(section_specs(model, PEERS, name), codec) for name, codec in SECTIONS)


def plan() -> dict[str, Any]:
    """What `spes plan` says of the full size."""
    command = [sys.executable, "-m", "spes_client.main", "plan", "--preset", "1b", "--nodes", str(PEERS), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"spes plan failed: {done.stderr.strip()}")
    planned: dict[str, Any] = json.loads(done.stdout)
    return planned


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run of the swarm gave: rounds of all peers, and bytes of each peer's line in a round, both ways."""

    rounds: list[Round]
    cycles: list[Cycle]
    bytes_sent: float
    bytes_received: float
    load_average: float
    own_part: float
    last_rounds: list[Round]
    last_bytes_sent: float
    """Of the last peer, which may be the slow one: seconds to send its contribution once; its rounds; bytes in one."""


def measure(
    model: Model, *, scale: float, train_seconds: float, rounds: int, lag: int, faster: float, slow: float
) -> Measured:
    """Run the swarm for so many rounds, with `lag` 1 until one more is trained: the first is not trained ahead.

    The lines' rates are divided by `scale` and multiplied by `faster`; the last peer sends at `slow` times the others'.
    """
    from tests.e2e import swarm as e2e

    bits_up, bits_down = BITS_UP * faster / scale, BITS_DOWN * faster / scale
    own_part = 8 * contribution_bytes(model) / (slow * bits_up)
    machines = [Machine(number, bits_up=bits_up * (slow if number == PEERS else 1.0)) for number in range(PEERS + 1)]
    lines = connect(machines, round_trip_seconds=ROUND_TRIP_SECONDS, bits_down=bits_down)
    blob_seconds = max(300.0, (PEERS + 1) * own_part)  # until it is known as slow it sends to each
    round_seconds = train_seconds + PATIENCE_SECONDS + blob_seconds
    try:
        with tempfile.TemporaryDirectory(prefix="spes-benchmark-") as folder:
            run = e2e.make_run(
                Path(folder), groups=PEERS, min_peers=PEERS, steps=STEPS, model=model, lag=lag,
                grace_seconds=30.0, blob_seconds=blob_seconds, propose_seconds=10.0, vote_seconds=10.0,
            )  # fmt: skip
            with e2e.Swarm(run) as swarm:
                door = e2e.door(swarm.bootstrap(side=machines[0]))
                peers = [_peer(swarm, f"peer{n}", door, machines[n], train_seconds) for n in range(1, PEERS + 1)]
                for peer in peers:
                    peer.until("training", lambda status: status.phase == "training", seconds=PATIENCE_SECONDS)
                before = [each.counted() for each in machines[1:]]
                for peer in peers:
                    peer.until(
                        f"training round {rounds}",
                        lambda status: status.round >= rounds and status.phase == "training",
                        seconds=rounds * round_seconds,
                    )
                if lag:
                    _until_trained(peers, rounds, seconds=round_seconds)
                after = [each.counted() for each in machines[1:]]
                load = os.getloadavg()[2]
                lives = [read_events(peer.run_dir.events_path).lives[-1] for peer in peers]
                for peer in peers:
                    peer.terminate()
    finally:
        lines.kill()
        lines.wait()
    sent, received = (
        [(late[way] - early[way]) / rounds for late, early in zip(after, before, strict=True)] for way in (0, 1)
    )
    found = [each for life in lives for each in rounds_of(life, lives)]
    cycles = [each for life in lives for each in cycles_of(life)]
    return Measured(
        rounds=found, cycles=cycles, bytes_sent=fmean(sent), bytes_received=fmean(received), load_average=load,
        own_part=own_part, last_rounds=rounds_of(lives[-1], lives), last_bytes_sent=sent[-1],
    )  # fmt: skip


def _until_trained(peers: Sequence[Any], number: int, *, seconds: float) -> None:
    """Wait until all have trained a round, as their logs say."""
    deadline = time.monotonic() + seconds
    paths = [peer.run_dir.events_path for peer in peers]
    while not all(_last(read_events(path).lives[-1].lines, "trained", round=number) for path in paths):
        if time.monotonic() > deadline:
            raise UserError(f"round {number} was not trained within {seconds:.0f} s")
        time.sleep(1.0)


def _peer(swarm: Any, name: str, door: str, place: Machine, train_seconds: float) -> Any:
    from tests.e2e import swarm as e2e

    home = swarm.run.folder / name
    volunteer = swarm.start(
        name, ROOT / "benchmarks" / "emulated" / "paced.py", "peer", train_seconds, "--plain", "--dir", home,
        "--peer", door, "--threads", 1, "--listen", f"/ip4/{place.address}/tcp/0", "--allow-source", swarm.run.folder,
        kind=e2e.Volunteer, prefix=place.prefix,
    )  # fmt: skip
    volunteer.home = home
    return volunteer


def figures_of(
    measured: Measured,
    planned: dict[str, Any],
    *,
    scale: float,
    train_seconds: float,
    encode: float,
    taking_in: float,
    lag: int,
    faster: float,
    slow: float,
) -> dict[str, Any]:
    """Everything that `--json` prints."""
    whole = mean(measured.rounds)
    full = at_full_size(whole, planned, encode_seconds=encode, scale=scale)
    overlap = overlapped(measured.cycles, full, taking_in=taking_in * scale) if lag else None
    # With overlap the log's marks of a round's beginning are no longer those of its training.
    shown = BESIDE if lag else tuple(PHASES)
    wall, full_wall = (
        (overlap["wall_seconds"], overlap["full_size_wall_seconds"]) if overlap else (whole.wall, sum(full.values()))
    )
    return {
        "machine": machine(),
        "load_average_15_minutes": measured.load_average,
        "lines": {
            "bits_up": BITS_UP * faster,
            "bits_down": BITS_DOWN * faster,
            "round_trip_seconds": ROUND_TRIP_SECONDS,
            "scale": scale,
        },
        "slow": {
            "share": slow,
            "own_part_seconds": measured.own_part,
            "upload_seconds": [each.upload for each in measured.last_rounds],
            "over_own_part": [each.upload / measured.own_part for each in measured.last_rounds],
            "sent_over_contribution": measured.last_bytes_sent / whole.contribution_bytes,
        }
        if slow < 1
        else None,
        "train_seconds": train_seconds,
        "lag": lag,
        "rounds_of_all_peers": len(measured.rounds),
        "wall_seconds": wall,
        "phase_seconds": {phase: whole.phases[phase] for phase in shown},
        "upload_seconds": whole.upload,
        "views": whole.views,
        "utilisation_as_measured": None if lag else whole.phases["train"] / whole.wall,
        "encode_alone_seconds": encode,
        "full_size": {"wall_seconds": full_wall, "phase_seconds": {phase: full[phase] for phase in shown}},
        "utilisation": None if lag else full["train"] / full_wall,
        "utilisation_reason": OTHER_LAG.format(0) if lag else "",
        "overlap": overlap,
        "utilisation_overlap": overlap["utilisation"] if overlap else None,
        "utilisation_overlap_reason": "" if lag else OTHER_LAG.format(1),
        "contribution_bytes": whole.contribution_bytes,
        "bytes_sent_per_peer_round": measured.bytes_sent,
        "bytes_received_per_peer_round": measured.bytes_received,
        "planned_bytes_per_peer_round": planned["traffic_bytes_per_round"],
        "rounds": [asdict(each) for each in measured.rounds],
    }


def _tables(figures: dict[str, Any]) -> list[Any]:
    lines, scale = figures["lines"], figures["lines"]["scale"]
    up, down, trip = lines["bits_up"] / 1e6, lines["bits_down"] / 1e6, 1000 * lines["round_trip_seconds"]
    times = new_table(
        f"A round of {PEERS} peers, {up:g} Mbit/s up, {down:g} down, {trip:g} ms; bytes and rates over {scale:.4g}",
        "phase", "measured", "share", "at full size", "share",
    )  # fmt: skip
    wall, full, overlap = figures["wall_seconds"], figures["full_size"], figures["overlap"]
    for phase, words in PHASES.items():
        if overlap is None or phase in BESIDE:
            seconds, whole = figures["phase_seconds"][phase], full["phase_seconds"][phase]
            row = [f"{seconds:.2f} s", f"{seconds / wall:.1%}", f"{whole:.2f} s", f"{whole / full['wall_seconds']:.1%}"]
            times.add_row(words, *(row if overlap is None else (row[0], "", row[2], "")))
    if overlap is None:
        times.add_row("round", f"{wall:.2f} s", "100.0%", f"{full['wall_seconds']:.2f} s", "100.0%")
    else:
        trained, cycle, whole = overlap["train_seconds"], overlap["wall_seconds"], overlap["full_size_wall_seconds"]
        times.add_row("train, beside these", f"{trained:.2f} s", f"{trained / cycle:.1%}", f"{trained:.2f} s", "")
        times.add_row("taking the agreed state in", "", "", f"{overlap['taking_in_seconds']:.2f} s", "")
        times.add_row("from one round trained to the next", f"{cycle:.2f} s", "100.0%", f"{whole:.2f} s", "")
    times.add_row("views of the agreement", f"{figures['views']:.2f}", "", "", "")
    times.add_row("upload, beside transfer", f"{figures['upload_seconds']:.2f} s", "", "", "")
    if slow := figures["slow"]:
        times.add_row(
            f"one at {slow['share']:g} of the rate: its part, once", f"{slow['own_part_seconds']:.2f} s", "", "", ""
        )
        for number, (seconds, share) in enumerate(zip(slow["upload_seconds"], slow["over_own_part"], strict=True)):
            times.add_row(f"until all others had it, round {number}", f"{seconds:.2f} s", f"{share:.2f}", "", "")
        times.add_row("all that it sent, of its contribution", f"{slow['sent_over_contribution']:.2f}", "", "", "")
    traffic = new_table("A peer's bytes in one round, times the scale", "", "measured", "spes plan")
    planned = figures["planned_bytes_per_peer_round"]
    for words, name, key in (
        ("own contribution", "contribution_bytes", "contribution"),
        ("sent in all", "bytes_sent_per_peer_round", "sent"),
        ("received in all", "bytes_received_per_peer_round", "received"),
    ):
        traffic.add_row(words, bytes_text(figures[name] * scale), bytes_text(planned[key]))
    result = new_table("", "utilisation", "with the small model", "at full size")
    if overlap is None:
        name, found = "without overlap", figures
    else:
        name, found = "with overlap", overlap
    result.add_row(name, f"{found['utilisation_as_measured']:.1%}", f"{found['utilisation']:.1%}")
    return [times, traffic, result]


def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--scale", type=float, default=20.0, metavar="N", help="divides bytes and rates (default 20)")
    parser.add_argument("--train-seconds", type=float, default=240.0, metavar="S", help="of a round (default 240)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="how many (default 4)")
    parser.add_argument("--lag", type=int, choices=(0, 1), default=0, help="1: train while the last round is agreed on")
    parser.add_argument("--slow", type=float, default=1.0, metavar="X", help="one peer sends at X times the rate")
    parser.add_argument("--faster", type=float, default=1.0, metavar="N", help="lines at N times the rate, for a try")
    arguments = parser.parse_args()
    if not 0.01 <= arguments.slow <= 1 or not 0.1 <= arguments.faster <= 100:
        raise UserError("--slow is 0.01 to 1, --faster 0.1 to 100")
    if (
        not 10 <= arguments.scale <= 1000
        or not 1 <= arguments.rounds <= 100
        or not 1 <= arguments.train_seconds <= 3600
    ):
        raise UserError("--scale is 10 to 1000, --rounds 1 to 100, --train-seconds 1 to 3600")
    problem = cage.obstacle() or ("" if os.path.exists("/dev/net/tun") else "there is no /dev/net/tun")
    if problem:
        raise UserError(f"the lines are emulated with network namespaces: {problem}")
    planned = plan()
    contribution = planned["traffic_bytes_per_round"]["contribution"]
    model = small_model(contribution / arguments.scale)
    scale = contribution / contribution_bytes(model)  # the model's widths are whole numbers
    encode, taking_in = encode_seconds(model), taking_in_seconds(model)
    cage.enter()
    asked = {
        "scale": scale, "train_seconds": arguments.train_seconds, "lag": arguments.lag,
        "faster": arguments.faster, "slow": arguments.slow,
    }  # fmt: skip
    measured = measure(model, rounds=arguments.rounds, **asked)
    figures = figures_of(measured, planned, encode=encode, taking_in=taking_in, **asked)
    show(_tables(figures), figures, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(_main))
