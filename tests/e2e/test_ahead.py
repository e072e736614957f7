"""A run with `lag` 1: training goes on while the last round is agreed on, and everything else is as ever."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.swarm import Swarm, Volunteer, door, make_run, same_ledger, states_fit

ROUNDS = 6


def begun_before_their_head(volunteer: Volunteer) -> list[int]:
    """The rounds whose training took longer than the head before them was there when it ended."""
    lines = volunteer.events()
    came = {line.fields["round"]: line.mono for line in lines if line.event == "head"}
    return [
        line.fields["round"]
        for line in lines
        if line.event == "trained" and line.mono - came[line.fields["round"]] < line.fields["seconds"]
    ]


def test_rounds_are_begun_while_the_last_is_agreed_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, groups=4, min_peers=2, per_peer=2, steps=12, lag=1)
    with Swarm(run) as swarm:
        boot = swarm.bootstrap()
        volunteers = [swarm.volunteer(f"v{i}", door(boot)) for i in range(2)]
        for volunteer in volunteers:
            volunteer.until_round(ROUNDS)
            # On a busy machine the head may be there before the trainer has begun, now and then.
            volunteer.until("often ahead", lambda s, v=volunteer: len(begun_before_their_head(v)) >= ROUNDS // 2)
        same_ledger(*volunteers)
        for volunteer in volunteers:
            assert 0 not in begun_before_their_head(volunteer)
            assert states_fit(volunteer) >= 1
            steps = [step for step in volunteer.steps() if step.commit is not None]
            headers = [
                h.record for step in steps if step.value for h in step.value.headers if h.signer == volunteer.peer_id
            ]
            assert all(header.steps >= 1 and header.tokens > 0 for header in headers)
            assert headers[-1].loss < headers[0].loss
        for program in swarm.programs:
            assert "Traceback" not in program.text and "internal error" not in program.text
