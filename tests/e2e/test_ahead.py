"""A run with `lag` 1: training goes on while the last round is agreed on, and everything else is as ever."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.swarm import Swarm, Volunteer, door, make_run, same_ledger, states_fit

ROUNDS = 8


def begun_before_their_head(volunteer: Volunteer) -> list[int]:
    """The rounds whose training took longer than the head before them was there when it ended."""
    events = [json.loads(line) for line in (volunteer.run_dir.path / "events.jsonl").read_text().splitlines()]
    came = {event["round"]: event["mono"] for event in events if event["event"] == "head"}
    return [
        event["round"]
        for event in events
        if event["event"] == "trained" and event["mono"] - came[event["round"]] < event["seconds"]
    ]


def test_rounds_are_begun_while_the_last_is_agreed_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, groups=4, min_peers=2, per_peer=2, steps=12, lag=1)
    with Swarm(run) as swarm:
        boot = swarm.bootstrap()
        volunteers = [swarm.volunteer(f"v{i}", door(boot)) for i in range(2)]
        for volunteer in volunteers:
            volunteer.until_round(ROUNDS)
        same_ledger(*volunteers)
        for volunteer in volunteers:
            early = begun_before_their_head(volunteer)
            assert len(early) >= ROUNDS // 2, early
            assert 0 not in early
            assert states_fit(volunteer) >= 1
            steps = [step for step in volunteer.steps() if step.commit is not None]
            headers = [
                h.record for step in steps if step.value for h in step.value.headers if h.signer == volunteer.peer_id
            ]
            assert all(header.steps >= 1 and header.tokens > 0 for header in headers)
            assert headers[-1].loss < headers[0].loss
        for program in swarm.programs:
            assert "Traceback" not in program.text and "internal error" not in program.text
