"""Findings about this machine and the home, judged: version, run, identity, ledger, files, disk, memory, ports."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from spes_client import ui
from spes_client.doctor_findings import Findings, PortFound, RunningFound
from spes_client.doctor_rows import Row, again, bad, good, here, join, unclear, warn
from spes_client.machine import memory_text
from spes_p2p.core.plan import GIB
from spes_p2p.peer.remembered import NETWORK

FILES_NEEDED = 768
"""Open files that a peer may need: 512 streams that others open (`net.libp2p`), its own, the ledger and the sockets."""

FILES_LEAST = 256
"""With fewer than this even a quiet peer runs out of them."""

_CHOSEN = ("--groups", "--gpus", "--device")

DISK_SPARE_BYTES = GIB
"""So much should stay free beside what the run needs at least."""


def home_rows(found: Findings) -> Iterator[Row]:
    """Whose home it is and which run it follows."""
    yield good("program", f"{found.program}, Python {found.python}, protocol {found.protocol}")
    yield _run(found)
    yield _peer_here(found)
    yield _identity(found)
    if found.home_found.identity == "good":
        yield _backup(found)
    if not found.home_found.run_problem and not found.home_found.problem:
        yield _ledger(found)
    if found.home_found.network_problem:
        yield _network_file(found)


def machine_rows(found: Findings) -> Iterator[Row]:
    """What the machine has for it."""
    yield _files(found)
    yield _disk(found)
    yield _memory(found)
    for port in found.ports:
        yield _port(found, port)


# ---- the home -------------------------------------------------------------------------------------------------------


def _run(found: Findings) -> Row:
    home = found.home_found
    if home.run_problem:
        return bad("run", "the run in this home cannot be read", home.run_problem, here(found, "spes repair"))
    if len(found.named_runs) > 1:
        named = ", ".join(run.hex()[:16] for run in found.named_runs)
        return bad(
            "run", f"the addresses name {len(found.named_runs)} runs", f"they end in {named}",
            f"use addresses of one run: {again(found, '--peer ADDRESS')}",
        )  # fmt: skip
    if home.pinned is not None and found.named_runs and found.named_runs[0] != home.pinned:
        return bad(
            "run", "the address is of another run than this home",
            f"this home follows {home.pinned.hex()[:16]}, the address names {found.named_runs[0].hex()[:16]}",
            f"give each run a home of its own: spes doctor --dir DIRECTORY --peer {shlex.quote(_given(found))}",
        )  # fmt: skip
    if found.manifest is not None and found.run_id is not None:
        version = found.manifest.version
        whose = f", organizer {ui.fingerprint(found.organizer)}" if found.organizer else ""
        return good("run", f"{found.run_name!r} {found.run_id.hex()[:16]}{whose}, manifest version {version}")
    if home.problem and not found.addresses:
        return unclear("run", "not known", "the home cannot be read, and no address was given", _with_address(found))
    if not found.addresses:
        return unclear("run", "none yet", "this home follows none, and no address was given", _with_address(found))
    return unclear(
        "run", "not known", "nobody who was asked gave its manifest",
        f"the rows below say what went wrong there; then: {again(found)}",
    )  # fmt: skip


def _given(found: Findings) -> str:
    named = [address.text for address in found.addresses if address.named_run is not None]
    return ui.one_line(named[0]) if named else "ADDRESS"


def _with_address(found: Findings) -> str:
    return again(found, "--peer ADDRESS")


def _peer_here(found: Findings) -> Row:
    running, what = found.running, "peer here"
    if running is None:
        return good(what, "none is running")
    pid = f"pid {running.pid}" if running.pid else "an unknown process"
    if running.is_silent:
        end = f"kill {running.pid}, or kill -9 {running.pid}" if running.pid else "end it"
        return bad(what, f"{pid} holds this home and does not answer", "its control socket is silent: it may hang",
                   f"if it is silent again ({here(found, 'spes status')}), end that process ({end}); then: "
                   + here(found, found.home_found.program))  # fmt: skip
    if not running.answered:
        return unclear(
            what, f"{pid} holds this home", "it has no control socket: it is starting, or it is another command",
            f"in a moment: {again(found)}",
        )  # fmt: skip
    shown = f"running ({pid}), round {running.round}, {running.phase}"
    if running.trainer == "crashed":
        return warn(what, f"{shown}, its trainer has crashed", ui.one_line(running.last_error) or "see trainer.log",
                    f"it is started again by itself; look with: {here(found, 'spes status')}")  # fmt: skip
    if running.waiting:
        return warn(what, f"{shown}, waiting", ui.one_line(running.waiting), here(found, "spes status --watch"))
    return good(what, shown)


def _identity(found: Findings) -> Row:
    home = found.home_found
    if home.is_file:
        return bad("home", "cannot be used", f"{found.home} is a file", f"give a directory: {again(found)}")
    if home.problem:
        cause = home.problem.partition("; ")[0]
        return bad(
            "home", "cannot be used", cause,
            f"use the account that it belongs to, or correct its rights (ls -ld {shlex.quote(str(found.home))}); then: "
            + again(found),
        )  # fmt: skip
    key = shlex.quote(str(found.home / "identity"))
    restore = f"spes keys restore BACKUP --key {key}"
    if home.identity == "good":
        return good("identity", f"readable: {home.peer}")
    if home.identity == "bad":
        if "chmod" in home.identity_problem:
            return bad("identity", "not usable", "other users can read it", f"chmod 600 {key}")
        cause = home.identity_problem.partition("; ")[0]
        return bad("identity", "not usable", cause, f"put it aside, and bring the key back: {_aside(key)} && {restore}")
    if home.identity == "none" and home.has_worked:
        return bad(
            "identity", "missing", "a peer has worked in this home, and its key is gone: the next start makes another",
            restore,
        )  # fmt: skip
    if home.identity == "none":
        return good("identity", "none yet: spes-join makes one")
    return unclear("identity", "not read", "the disk did not answer in time", again(found))


def _backup(found: Findings) -> Row:
    home, what = found.home_found, "identity backup"
    make = f"make one, and keep FILE on another machine: {here(found, 'spes keys backup FILE')}"
    if home.backup_problem:
        return unclear(what, "not known", home.backup_problem, make)
    if not home.backup_fingerprint:
        return warn(what, "none is noted", "who loses the key comes back as a stranger; no other machine has it", make)
    day = home.backup_day
    if home.backup_fingerprint != ui.fingerprint(home.peer):
        return warn(what, f"noted {day} of another key: {home.backup_fingerprint}", "this key was made later", make)
    return good(what, f"noted {day}; where the file is now cannot be seen from here")


def _ledger(found: Findings) -> Row:
    home = found.home_found
    if home.ledger_lost:
        return bad(
            "ledger", "empty or gone", "this peer has taken part in the run: what it voted for is lost with its ledger",
            here(found, "spes repair"),
        )  # fmt: skip
    if home.ledger == "good":
        return good("ledger", f"readable, {home.ledger_records} records (spes repair checks each of them)")
    if home.ledger == "bad":
        return bad("ledger", "not readable", home.ledger_problem, here(found, "spes repair"))
    if home.ledger == "none":
        return good("ledger", "none yet")
    if found.running is not None:
        return good("ledger", "in use by the peer here")
    return unclear("ledger", "not read in time", "it is large, or the disk is slow", here(found, "spes repair"))


def _network_file(found: Findings) -> Row:
    place = shlex.quote(str(found.home / NETWORK))
    return warn(
        "network file", "not readable: where others were is forgotten", found.home_found.network_problem,
        f"put it aside ({_aside(place)}), and give an address of the run: {again(found, '--peer ADDRESS')}",
    )  # fmt: skip


def _aside(place: str) -> str:
    return f"mv {place} {place}.damaged"


# ---- the machine ----------------------------------------------------------------------------------------------------


def _files(found: Findings) -> Row:
    soft, hard = found.machine.files_soft, found.machine.files_hard
    if soft is None:
        return unclear("open files", "not known", "the system did not say", "ulimit -n")
    shown = "no limit" if soft < 0 else f"limit {soft}"
    if soft < 0 or soft >= FILES_NEEDED:
        return good("open files", shown)
    may = hard is not None and (hard < 0 or hard >= FILES_NEEDED)
    raise_it = f"ulimit -n {FILES_NEEDED * 4 if hard is None or hard < 0 else min(hard, FILES_NEEDED * 4)}"
    advice = (
        f"raise it in the shell that starts the peer: {raise_it}"
        if may
        else "as root set nofile in /etc/security/limits.conf, log in again and look: ulimit -n"
    )
    make = bad if soft < FILES_LEAST else warn
    return make("open files", shown, f"a peer of many others may need {FILES_NEEDED}", advice)


def _disk(found: Findings) -> Row:
    machine = found.machine
    if machine.disk_free is None:
        return unclear("disk", "not known", "the disk did not answer in time", again(found))
    free = memory_text(machine.disk_free)
    if machine.disk_needed is None:
        return unclear(
            "disk", f"{free} free", "what the run needs is not known without its manifest", _with_address(found)
        )
    missing = machine.disk_needed - machine.disk_used
    needs = f"{free} free, the run needs {memory_text(machine.disk_needed)}"
    if machine.disk_used:
        needs += f", {memory_text(machine.disk_used)} of it here"
    df = f"df -h {shlex.quote(str(found.home))}"
    is_asked = found.running is None  # what a peer that runs was given is its own matter
    if is_asked and machine.disk_needed > machine.disk_quota:
        allow = f"--disk {-(-machine.disk_needed // GIB)}"
        return bad("disk", needs, f"--disk allows {memory_text(machine.disk_quota)}", again(found, allow))
    if machine.disk_free < missing:
        return bad("disk", needs, "there is no room for the model's states",
                   f"free some space ({df}), or give a --dir on a larger disk; then: {again(found)}")  # fmt: skip
    if machine.disk_free < missing + DISK_SPARE_BYTES:
        return warn("disk", needs, "that is little more than the least", f"free some space: {df}")
    room = machine.disk_free + machine.disk_used - DISK_SPARE_BYTES
    if is_asked and machine.disk_quota + machine.disk_cache > room:
        cache = min(machine.disk_cache, room // 8) // GIB
        fitting = max(-(-machine.disk_needed // GIB), room // GIB - cache)
        return warn(
            "disk", needs, f"--disk and --cache allow {memory_text(machine.disk_quota + machine.disk_cache)}, more than"
            " there is: the disk would be full before old states go",
            join(found, f"--disk {fitting}", f"--cache {max(1, cache)}"),
        )  # fmt: skip
    return good("disk", needs)


def _memory(found: Findings) -> Row:
    machine, what = found.machine, "memory and card"
    if found.running is not None and found.running.answered:
        return good(what, f"in use by the peer here, trainer {found.running.trainer or 'none'}")
    if machine.fit_problem:
        plan = f" ({here(found, 'spes plan')} shows what is needed)" if found.home_found.pinned is not None else ""
        return bad(what, machine.place or "too little", machine.fit_problem,
                   f"end what else takes memory, or use a machine with more{plan}; then: {again(found)}")  # fmt: skip
    if not machine.fit:
        cause = "what the run needs is not known without its manifest"
        if found.manifest is not None:
            cause = "the machine did not say in time what it has, or its card's driver does not"
            look = f"if there is an NVIDIA card, look whether it answers (nvidia-smi); then: {again(found)}"
            return unclear(what, machine.place or "not known", cause, look)
        return unclear(what, machine.place or "not known", cause, _with_address(found))
    first, *others = machine.fit
    tight = next((line for line in others if line.startswith("memory is tight")), "")
    if "may run out of memory" in first or tight:
        return warn(what, first, tight or "what was asked for is more than fits", "end what else takes memory, or "
                    f"leave the choice to spes-join: {again(found, without=_CHOSEN)}")  # fmt: skip
    return good(what, "; ".join([first, *others]))


def _port(found: Findings, port: PortFound) -> Row:
    what = f"listen {ui.one_line(port.address)[:48]}"
    another = again(found, "--listen /ip4/0.0.0.0/tcp/PORT")
    if port.is_malformed:
        return bad(what, "no address to listen on", port.problem, again(found, "--listen /ip4/0.0.0.0/tcp/4001"))
    if port.in_use and found.running is not None and port.port in _ports(found.running):
        return good(what, "used by the peer here")
    if port.in_use and not port.asked:
        return warn(
            what, "the port of the last time is in use", "another program has it: others will not find this peer there",
            f"see which (ss -ltnp 'sport = :{port.port}'), end it; then: {again(found)}",
        )  # fmt: skip
    if port.in_use:
        return bad(
            what, "in use", "another program listens there",
            f"see which (ss -ltnp 'sport = :{port.port}'), or choose another port: {another}",
        )  # fmt: skip
    if port.problem:
        return bad(what, "cannot be listened on", port.problem, another)
    return good(what, "free")


def _ports(running: RunningFound) -> set[int]:
    parts = [address.split("/") for address in running.addresses]
    return {int(part[4]) for part in parts if len(part) > 4 and part[3] == "tcp" and part[4].isdigit()}
