"""How long a newcomer takes from its start to the head's state, and to its first training step, by its line's rate.

    python benchmarks/join.py                       lines of 50, 100 and 200 Mbit/s (minutes; needs root)
    python benchmarks/join.py --mbits 100 --slow    the same with one of the three holders at a twentieth of the rate

Real programs, each in a network namespace of its own, on a bridge: a bootstrap, three volunteers, and the newcomer,
whose line towards it is limited by `tc` (token bucket). As all share the cores of one machine, the volunteers pause
training until the newcomer is up to date; the first step waits for the round that they close then.

The measure is the time over what the state alone would take on that line, so 1 is the bound; starting Python, headers
and the ledger come on top.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import machine, new_parser, new_table, show

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spes_client.ui import bytes_text, run_program
from spes_protocols.errors import UserError
from tests.chaos import cage

HOLDERS = 3
GROUPS = 4
MODEL = {
    "vocab_size": 257,
    "hidden_size": 512,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "sequence_length": 32,
}
ROUNDS_BEFORE = 10
"""So many short rounds before the newcomers come: their blobs are then more than the state."""

STEPS_BEFORE, STEPS = 2, 40
SLOW_SHARE = 20
SECONDS_MAX = 900.0


@dataclass(frozen=True, kw_only=True)
class Joined:
    """One newcomer. Times from its start; `bytes_down` is payload until it was up to date."""

    mbits: float
    slow_holder: bool
    state_bytes: int
    state_seconds: float
    fetching_from_seconds: float
    up_to_date_seconds: float
    first_step_seconds: float
    bytes_down: int

    @property
    def fetch_ratio(self) -> float:
        """Time from the ledger's end to the head's state, over that of the state alone."""
        return (self.up_to_date_seconds - self.fetching_from_seconds) / self.state_seconds

    @property
    def up_to_date_ratio(self) -> float:
        """Time over that of the state alone."""
        return self.up_to_date_seconds / self.state_seconds

    @property
    def first_step_ratio(self) -> float:
        """The same to the first step."""
        return self.first_step_seconds / self.state_seconds


def limit(namespace: str, device: str, mbits: float) -> None:
    """Let a device send no faster than this: a bucket with a queue of 100 ms behind it, so that TCP finds the rate."""
    command = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf"]
    command += ["rate", f"{mbits}mbit", "burst", "256kb", "latency", "100ms"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"this kernel does not limit lines: {done.stderr.strip()}")


def measure(rates: list[float], *, slow: bool) -> list[Joined]:
    """One newcomer after another joins a swarm of three."""
    from tests.e2e import swarm as e2e

    network = cage.Network()
    lines = [network.machine(number) for number in range(HOLDERS + 1 + len(rates))]
    results = []
    with tempfile.TemporaryDirectory(prefix="spes-benchmark-") as folder, e2e.Swarm(_run(Path(folder))) as swarm:
        address = e2e.door(swarm.bootstrap(side=lines[0]))
        holders = [swarm.volunteer(f"holder{n}", address, side=lines[1 + n]) for n in range(HOLDERS)]
        for holder in holders:
            holder.until_round(ROUNDS_BEFORE, seconds=SECONDS_MAX)
        for number, mbits in enumerate(rates):
            for holder in holders:
                swarm.spes("pause", "--dir", holder.home)
            place = HOLDERS + 1 + number
            limit("hub", f"m{place}", mbits)
            if slow:
                limit(f"m{HOLDERS}", "line", mbits / SLOW_SHARE)
            results.append(_join(swarm, holders, address, lines[place], mbits, slow=slow))
    return results


def _run(folder: Path) -> Any:
    """The tests' small run, with a model whose state has a size worth fetching."""
    from spes_p2p.crypto.envelope import seal
    from spes_p2p.delta.genesis import genesis_root
    from spes_protocols.manifest import Model
    from tests.e2e import swarm as e2e

    run = e2e.make_run(
        folder, groups=GROUPS, min_peers=HOLDERS, steps=STEPS_BEFORE, blob_seconds=120.0, grace_seconds=20.0
    )  # fmt: skip
    record, model = run.manifest.record, Model(**MODEL)
    short = record.rounds.phases[0]
    phases = (short, replace(short, from_step=STEPS_BEFORE * ROUNDS_BEFORE, steps=STEPS))
    record = replace(record, model=model, rounds=replace(record.rounds, phases=phases))
    signed = seal(replace(record, genesis_root=genesis_root(model, GROUPS, record.seed)), run.key)
    run.path.write_bytes(signed.raw)
    return replace(run, manifest=signed)


def _join(swarm: Any, holders: list[Any], address: str, line: Any, mbits: float, *, slow: bool) -> Joined:
    begun = time.monotonic()
    newcomer = swarm.volunteer(f"newcomer{len(swarm.programs)}", address, side=line)
    newcomer.wait_line("read .* records of the ledger", seconds=SECONDS_MAX)
    fetching = time.monotonic() - begun
    newcomer.wait_line("up to date", seconds=SECONDS_MAX)
    up_to_date = time.monotonic() - begun
    status = newcomer.status()
    for holder in holders:
        swarm.spes("resume", "--dir", holder.home)
    newcomer.until("training", lambda s: s.phase == "training" and s.step > 0, seconds=SECONDS_MAX)
    first_step = time.monotonic() - begun
    size = newcomer.run_dir.states().layout.file_bytes
    newcomer.terminate()
    newcomer.wait_exit(SECONDS_MAX)
    return Joined(
        mbits=mbits,
        slow_holder=slow,
        state_bytes=size,
        state_seconds=size * 8 / (mbits * 1e6),
        fetching_from_seconds=fetching,
        up_to_date_seconds=up_to_date,
        first_step_seconds=first_step,
        bytes_down=status.bytes_down,
    )


def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--mbits", type=float, nargs="+", default=[50.0, 100.0, 200.0], metavar="RATE", help="lines")
    parser.add_argument("--slow", action="store_true", help="one of the holders has a twentieth of that")
    arguments = parser.parse_args()
    problem = cage.obstacle()
    if problem:
        raise UserError(f"the lines are emulated with network namespaces: {problem}")
    cage.enter()
    results = measure(arguments.mbits, slow=arguments.slow)
    kind = ", one of three holders at a twentieth of the rate" if arguments.slow else ", three holders"
    table = new_table(
        f"Joining a run whose state has {bytes_text(results[0].state_bytes)}{kind}",
        "line (tc tbf)", "state alone", "received", "begins after", "fetch ratio",
        "up to date", "ratio", "first step", "ratio",
    )  # fmt: skip
    for each in results:
        table.add_row(
            f"{each.mbits:g} Mbit/s", f"{each.state_seconds:.1f} s", bytes_text(each.bytes_down),
            f"{each.fetching_from_seconds:.1f} s", f"{each.fetch_ratio:.2f}", f"{each.up_to_date_seconds:.1f} s",
            f"{each.up_to_date_ratio:.2f}", f"{each.first_step_seconds:.1f} s", f"{each.first_step_ratio:.2f}",
        )  # fmt: skip
    ratios = ("fetch_ratio", "up_to_date_ratio", "first_step_ratio")
    joined = [asdict(each) | {name: getattr(each, name) for name in ratios} for each in results]
    figures = {"machine": machine(), "lines": "tc tbf in network namespaces", "joined": joined}
    show([table], figures, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(_main))
