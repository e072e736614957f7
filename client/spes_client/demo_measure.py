"""`python -m spes_client.demo_measure DIR PART PARTS`: how good each state of a log is, one JSON line a state.

Walks the log of DIR from the seed on, applies each round, and measures the whole held-out text on every state whose
round leaves the remainder PART by PARTS: the demo runs one such process a core. Not a command for people.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from spes_client.ui import run_program
from spes_p2p.delta.contributions import contributions
from spes_p2p.model.evaluate import bits_per_byte
from spes_p2p.replay.export import token_data
from spes_p2p.replay.log import Log, open_ledger
from spes_p2p.replay.states import Recomputed, work_folder
from spes_p2p.store.rundir import RunDir, resolve_run_dir

_ROUNDS_MAX = 2**40


def measured(run: RunDir, part: int, parts: int, data_dir: Path) -> Iterator[tuple[int, float]]:
    """(N, bits per byte of S_N) for every N that is `part` modulo `parts`, in ascending order, S_0 included."""
    manifest = run.manifest.record
    tokens = token_data(run, [str(data_dir)], lambda what, share: None).heldout()

    def measure(states: Recomputed, root: bytes) -> float:
        state = states.get(root)
        assert state is not None
        heldout_bytes = manifest.data.heldout_bytes
        return bits_per_byte(state, manifest.model, manifest.ownership.groups, tokens, heldout_bytes, threads=1)

    with open_ledger(run) as db, work_folder(run, None) as folder:
        states = Recomputed(run, folder, 1)
        root = states.genesis()
        if part == 0:
            yield 0, measure(states, root)
        for step in Log(manifest, run.run_id, db).commits(0, _ROUNDS_MAX):
            assert step.value is not None
            before, root = root, states.apply(step.before, contributions(step.before, step.value))
            if root != before:
                states.drop(before)
            if step.after.round % parts == part:
                yield step.after.round, measure(states, root)


def _main(arguments: list[str]) -> int:
    run, part, parts = resolve_run_dir(Path(arguments[0])), int(arguments[1]), int(arguments[2])
    data_dir = Path(run.manifest.record.data.tokenizer.url).parent  # the demo's own manifest, so its own directory
    for round_number, value in measured(run, part, parts, data_dir):
        print(json.dumps({"round": round_number, "bits_per_byte": value}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(lambda: _main(sys.argv[1:])))
