"""`python -m tests.nat.doctor KIND [FLAG...]`: what `spes doctor` prints for a volunteer behind a router of that kind.

Also of the kind `mapping`: a symmetric one that opens ports when asked.
An internet of namespaces with the bootstraps of a real run, one of them an archive; `spes doctor` is given their
addresses. Further words are flags of it. Exit code: its own, or 77 where there can be no namespaces.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import cage
from tests.nat import mapping, world

EXIT_NO_NAMESPACES = 77
_PATIENT = """
import sys
from spes_client import doctor, doctor_probes as probes, prober
from spes_client.main import main
doctor.SECONDS_MAX = 100.0
probes.DAEMON_SECONDS = probes.BACK_SECONDS = prober.START_SECONDS = 60.0
sys.exit(main())
"""
"""The command on a machine that may be slow: nothing here is about how long it takes."""

MAPPING = "mapping"
BOOTSTRAPS = 4
"""A peer behind a router learns its outer address from so many others before it believes it."""


def main(argv: Sequence[str]) -> int:
    """Build, ask, print."""
    kind, *flags = argv or ("symmetric",)
    if kind not in (*world.KINDS, MAPPING):
        print(f"no kind {kind}; there are {', '.join((*world.KINDS, MAPPING))}", file=sys.stderr)
        return 2
    reason = world.obstacle() or cage.obstacle()
    if reason:
        print(f"no NAT laboratory here: {reason}", file=sys.stderr)
        return EXIT_NO_NAMESPACES
    with tempfile.TemporaryDirectory(prefix="spes-nat-") as name:
        cage.enter()
        return _ask(kind, flags, Path(name))


def _ask(kind: str, flags: Sequence[str], folder: Path) -> int:
    from tests.e2e.swarm import Program, Swarm, door, make_run  # after the fork: they bring threads

    internet = world.Internet()
    with Swarm(make_run(folder, groups=1, min_peers=1)) as swarm:
        bootstraps: list[Program] = []
        for number in range(BOOTSTRAPS):
            # Port 443 is what the strictest router lets through.
            host = internet.public(f"bootstrap{number}")
            known = [word for boot in bootstraps for word in ("--peer", door(boot))]
            more = ("--archive",) if not number else ()
            listen = ("--listen", f"/ip4/{host.address}/tcp/443")
            arguments = ("--manifest", swarm.run.path, "--dir", folder / host.name, *listen, *known, *more)
            bootstraps.append(swarm.start(host.name, "-m", "spes_bootstrap.main", *arguments, prefix=host.prefix))
        for boot in bootstraps:
            boot.wait_line("up to date")
        peers = [word for boot in bootstraps for word in ("--peer", door(boot))]
        home = internet.home("symmetric" if kind == MAPPING else kind, "volunteer")
        gateway = mapping.gateway_on(internet.boxes["volunteer"]) if kind == MAPPING else None
        os.environ["SPES_HOME"] = str(folder / "home")
        arguments = ("doctor", "--device", "cpu", *peers, *flags)
        doctor: Program = swarm.start("doctor", "-c", _PATIENT, *arguments, prefix=home.prefix)
        code = doctor.wait_exit()
        print(doctor.text)
        if gateway is not None:
            gateway.kill()
            gateway.wait()
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
