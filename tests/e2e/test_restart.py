"""Volunteers that are killed come back as themselves: alone, all at once, and never twice at the same time."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from safetensors import safe_open

from tests.e2e.swarm import Swarm, Volunteer, door, expecting_no_orphans, make_run, same_ledger, states_fit
from tests.e2e.test_swarm import until_contribution, votes_were_kept_to


def moments(volunteer: Volunteer) -> dict[str, int]:
    """How many steps the optimiser has taken on each parameter, by the trainer's file."""
    (path,) = volunteer.run_dir.optim_dir.glob("*.safetensors")
    with safe_open(path, framework="numpy") as file:
        steps: dict[str, int] = json.loads(file.metadata()["steps"])
    return steps


def test_volunteers_come_back_as_themselves(tmp_path: Path) -> None:
    run = make_run(tmp_path, lease_rounds=1000)  # on a slow machine rounds may pass before the killed one is back
    with Swarm(run) as swarm:
        boot = swarm.bootstrap()
        victim, *others = [swarm.volunteer(f"v{i}", door(boot)) for i in range(4)]
        for volunteer in (victim, *others):
            volunteer.until_round(2)
        until_contribution(victim, 0)

        # A second process on the same home is turned away, and the first goes on.
        second = swarm.volunteer("v1", door(boot))
        assert f"in use by pid {others[0].pid}" in second.error(2)

        # Killed in the middle of a round.
        victim.until("training", lambda s: s.phase == "training" and s.step > 0)
        with expecting_no_orphans(victim):
            victim.signal(signal.SIGKILL)
            victim.wait_exit()
        owner, before = victim.peer_id, moments(victim)
        # Its contribution to the round in which it died may have been saved, and is then sent without training.
        died_in = victim.steps()[-1].after.round
        again = swarm.volunteer("v0", door(boot))
        back = until_contribution(again, died_in + 1)
        assert again.peer_id == owner
        after = moments(again)
        assert before.keys() <= after.keys()
        assert all(after[name] > steps for name, steps in before.items())
        others[0].until_round(back + 1)

        # All at once, and the address that they once pasted leads nowhere any more.
        everyone = [again, *others]
        for program in (boot, *everyone):
            program.signal(signal.SIGKILL)
        for program in (boot, *everyone):
            program.wait_exit()
        last = max(volunteer.steps()[-1].after.round for volunteer in everyone)
        everyone = [swarm.volunteer(f"v{i}", door(boot)) for i in range(4)]
        for volunteer in everyone:
            volunteer.until_round(last + 2)

        # What the killed ones could not clear away, their successors have.
        assert len(list(swarm.temporary.glob("spes-*"))) == len(everyone)

        same_ledger(*everyone)
        votes_were_kept_to(*everyone)
        assert all(states_fit(volunteer) >= 1 for volunteer in everyone)
        leaves_twice(everyone[0])
        for program in swarm.programs:
            assert "internal error" not in program.text
            assert "Traceback" not in program.text


def leaves_twice(volunteer: Volunteer) -> None:
    """Ctrl-C leaves after the round, a second one at once; nothing stays behind."""
    volunteer.until("in a round", lambda s: s.phase == "training")
    with expecting_no_orphans(volunteer):
        volunteer.signal(signal.SIGINT)
        volunteer.wait_line("leaving: ")
        volunteer.signal(signal.SIGINT)
        assert volunteer.wait_exit() in (0, 130)  # the round may have ended in between
