"""Where the time of a demo's round goes, and what each peer sends, against fp32 SPES and full DiLoCo.

    python benchmarks/round.py              runs a short demo in a temporary directory first (minutes)
    python benchmarks/round.py --dir DIR    reads a finished `spes demo --dir DIR`

The seconds are wall time of one peer and add up to its round; a mean over peers and rounds, without the first round,
in which the trainers start. The bytes come in two kinds that must not be mixed: a peer's own contribution, once, and
all that it sends, for without a server each contribution travels to every other peer.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import machine, new_parser, new_table, show

from spes_client.demo_results import Result
from spes_client.demo_setup import PEERS_DEFAULT
from spes_client.ui import bytes_text, run_program
from spes_p2p.core.tensors import section_specs, tensor_specs
from spes_p2p.crypto.envelope import unseal_manifest
from spes_protocols.errors import UserError
from spes_protocols.manifest import Manifest
from spes_protocols.messages import SHARED

_FP32_BYTES = 4
_ROUNDS_DEFAULT = 3

_PHASES = {
    "train": "train: the local steps",
    "encode": "encode: from deltas to blobs",
    "publish": "load, save, hash and sign around them",
    "transfer": "transfer: others' blobs",
    "check": "check them",
    "agree": "agree: from the first vote to the stored commit",
    "apply": "apply: the next state and its root",
    "wait": "wait for slower peers",
}


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Mean seconds of a peer's round: all of it, and by phase."""

    round_seconds: float
    phase_seconds: dict[str, float]
    rounds: int


def read_timings(folder: Path) -> Timings:
    """From the marks that a demo leaves of the beginning of each round. Raises `UserError` if there are none."""
    peers = _read(folder / "timings.json")
    spans = [(before, after) for marks in peers.values() for before, after in itertools.pairwise(marks)]
    later = [span for span in spans if span[0]["round"] > 0]
    chosen = later or spans
    if not chosen:
        raise UserError(f"{folder} holds no timings of a whole round")
    phases = {
        phase: sum(after["phases"][phase] - before["phases"][phase] for before, after in chosen) / len(chosen)
        for phase in _PHASES
    }
    seconds = sum(after["at_seconds"] - before["at_seconds"] for before, after in chosen) / len(chosen)
    return Timings(round_seconds=seconds, phase_seconds=phases, rounds=len({span[0]["round"] for span in chosen}))


def tensor_bytes(manifest: Manifest, peers: int) -> tuple[float, int]:
    """(fp32 bytes of the shared section and a peer's mean share of the groups, fp32 bytes of all tensors)."""
    model, groups = manifest.model, manifest.ownership.groups
    shared = sum(spec.size for spec in section_specs(model, groups, SHARED))
    everything = sum(spec.size for spec in tensor_specs(model, groups))
    return _FP32_BYTES * (shared + (everything - shared) / peers), _FP32_BYTES * everything


def bytes_figures(manifest: Manifest, result: Result) -> dict[str, dict[str, float]]:
    """By method: `contribution_bytes` and `bytes_up_per_peer_round`; the latter computed for the others."""
    fp32_spes, diloco = tensor_bytes(manifest, result.peers)
    others = result.peers - 1
    return {
        "spes_p2p": {
            "contribution_bytes": result.contribution_bytes,
            "bytes_up_per_peer_round": result.bytes_up_per_peer_round,
        },
        "fp32_spes": {"contribution_bytes": fp32_spes, "bytes_up_per_peer_round": fp32_spes * others},
        "diloco": {"contribution_bytes": diloco, "bytes_up_per_peer_round": diloco * others},
    }


def report(folder: Path, *, as_json: bool) -> None:
    """Print what a finished demo shows. Raises `UserError` for a directory that holds none."""
    result = Result(**_read(folder / "result.json"))
    manifest = unseal_manifest((folder / "run.spes").read_bytes()).record
    timings, sizes = read_timings(folder), bytes_figures(manifest, result)
    codecs = f"shared {manifest.codecs.shared}, groups {manifest.codecs.group}"
    figures = {
        "machine": machine(),
        "peers": result.peers,
        "rounds": timings.rounds,
        "round_seconds": timings.round_seconds,
        "phase_seconds": timings.phase_seconds,
        "bytes": sizes,
    }
    times = new_table(
        f"One round of {result.peers} peers, mean of {timings.rounds} rounds", "phase", "seconds", "share"
    )
    for phase, words in _PHASES.items():
        seconds = timings.phase_seconds[phase]
        times.add_row(words, f"{seconds:.2f}", f"{seconds / timings.round_seconds:.1%}")
    times.add_row("round", f"{timings.round_seconds:.2f}", "100.0%")
    traffic = new_table("A peer's bytes in one round", "method", "own contribution", "sent in all", "times ours")
    names = {
        "spes_p2p": f"measured here ({codecs})",
        "fp32_spes": "SPES in fp32, computed",
        "diloco": "full DiLoCo in fp32, computed",
    }
    for method, size in sizes.items():
        own, sent = size["contribution_bytes"], size["bytes_up_per_peer_round"]
        ratio = own / result.contribution_bytes
        traffic.add_row(names[method], bytes_text(own), bytes_text(sent), f"{ratio:.1f}")
    show([times, traffic], figures, as_json=as_json)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        raise UserError(f"no {path.name} in {path.parent}: make it with: spes demo --dir {path.parent}") from None


def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--dir", type=Path, metavar="DIR", help="a finished demo to read instead of running one")
    parser.add_argument("--rounds", type=int, default=_ROUNDS_DEFAULT, metavar="N", help="rounds of the short demo")
    parser.add_argument("--peers", type=int, default=PEERS_DEFAULT, metavar="N", help="its volunteers")
    arguments = parser.parse_args()
    if arguments.dir is not None:
        report(arguments.dir, as_json=arguments.json)
        return 0
    with tempfile.TemporaryDirectory(prefix="spes-benchmark-") as folder:
        command = [sys.executable, "-m", "spes_client.main", "demo", "--dir", folder, "--json"]
        command += ["--rounds", str(arguments.rounds), "--peers", str(arguments.peers)]
        code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
        if code != 0:
            raise UserError(f"the demo ended with exit code {code}; see its lines above")
        report(Path(folder), as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(_main))
