"""`spes-join` on this machine: how many groups, how many sequences at once, and how the trainer keeps what it has.

The manifest and the machine --> `core.choice` --> the peer's options, and a line or two that say what was chosen. What
the person asked for stays, and is told where it does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from spes_client import measured, ui
from spes_client.machine import Machine, look, memory_text
from spes_client.subject import Subject, of_manifest
from spes_p2p.core import plan
from spes_p2p.core.choice import Choice, Wish, choose, in_words
from spes_p2p.core.engine import NARROW_BETA_MAX
from spes_p2p.core.plan import Device
from spes_protocols.errors import UserError

if TYPE_CHECKING:
    from spes_p2p.peer.options import PeerOptions
    from spes_protocols.manifest import Manifest


def fit(manifest: Manifest, options: PeerOptions, say: Callable[[str], None]) -> PeerOptions:
    """The options with everything chosen that was left open, so that the run fits into this machine.

    Raises `UserError` if nothing does, and nothing was asked for that should be tried all the same.
    """
    subject, machine = of_manifest(manifest), look(options.home)
    wanted = options.trainer.device
    device: Device = machine.device if wanted == "auto" else "cuda" if wanted == "cuda" else "cpu"
    if device == "cuda" and machine.card is None:
        return options  # its driver does not say what it has: the trainer will find out
    wish = replace(options.trainer.engine, groups=options.groups)
    possible = wish
    if wish.moments is None and max(manifest.optimizer.beta1, manifest.optimizer.beta2) > NARROW_BETA_MAX:
        possible = replace(wish, moments="fp32")
    devices = options.trainer.devices
    if device == "cuda" and 1 < devices > len(machine.cards):
        raise UserError(
            f"{devices} GPUs were asked for, and {len(machine.cards)} are usable here: use fewer with --gpus"
        )
    choice = _choice(subject, machine, device, devices, possible)
    for line in _lines(subject, machine, device, devices, wish, choice):
        say(line)
    known = measured.load(options.home)
    peak_flops = 0.0
    if known is not None and (known.rates.device == device):
        if device == "cuda" or known.rates.threads == options.trainer.threads:
            peak_flops = known.rates.matmul_flops
        line = _seconds_line(subject, known, choice) if devices == 1 else ""  # one device was measured
        if line:
            say(line)
    chosen = Wish(groups=wish.groups, **vars(choice.engine))
    groups = choice.owned if options.groups is None and choice.owned < _owned_max(subject) else options.groups
    trainer = replace(options.trainer, engine=chosen, peak_flops=peak_flops)
    return replace(options, groups=groups, trainer=trainer)


def _owned_max(subject: Subject) -> int:
    return min(subject.ownership.per_peer_max, subject.groups)


def _choice(subject: Subject, machine: Machine, device: Device, devices: int, wish: Wish) -> Choice:
    """What fits beside the rest of the peer; on a CPU, if no group does, what fits without the processes' allowance."""

    def beside(owned: int) -> int:
        if device != "cpu":
            return 0
        return subject.host_bytes(owned, device, devices) // devices

    def within(bytes_free: int) -> Choice:
        return choose(
            subject.model, subject.groups, wish, device=device, devices=devices, device_bytes=bytes_free,
            beside=beside, owned_max=_owned_max(subject),
            sequences=subject.sequences,
        )  # fmt: skip

    free = machine.device_bytes(device, devices)
    choice = within(free)
    if device != "cpu" or (choice.fits and choice.owned):
        return choice
    tight = within(free + plan.PROCESS_BYTES["cpu"] + plan.PEER_PROCESSES_BYTES // devices)
    return tight if tight.fits and (tight.owned or not choice.fits) else choice


def _lines(subject: Subject, machine: Machine, device: Device, devices: int, wish: Wish, choice: Choice) -> list[str]:
    """What was chosen and why. Raises `UserError` where nothing fits and nothing was asked for."""
    place = _place(machine, device, devices)
    ways = _ways(subject, device, devices, choice)
    needs = f"needs {memory_text(choice.memory.total)}{' on each' if devices > 1 else ''}"
    own = subject.host_bytes(choice.owned, device, devices)
    needs += f", beside {memory_text(own)} for the rest of the peer"
    if choice.fits:
        lines = [f"{place}: {ways}; {needs}"]
        host = own + (devices * choice.memory.total if device == "cpu" else 0)
        if host > machine.host_free_bytes:
            free = memory_text(machine.host_free_bytes)
            lines.append(f"memory is tight: all of the peer needs about {memory_text(host)}, and {free} are free")
        return lines
    if not wish.asks_for_memory:
        raise UserError(
            f"this run does not fit into this machine. {place}, and the least there is, {ways}, {needs}. "
            f"Join on a machine with more, or try it all the same with flags of your own, such as --groups 0"
        )
    other = _choice(subject, machine, device, devices, Wish(compile=wish.compile, grouped=wish.grouped))
    would = f"this would fit: {_ways(subject, device, devices, other)}" if other.fits else "nothing would fit"
    return [f"{place}: what you asked for {needs}, and may run out of memory ({ways}); {would}"]


def _place(machine: Machine, device: Device, devices: int) -> str:
    if device == "cuda" and machine.card is not None:
        total, free = memory_text(machine.card.total_bytes), memory_text(machine.device_bytes(device, devices))
        many = f"{devices} x " if devices > 1 else ""
        return f"{many}{ui.one_line(machine.card.name)}, {free} of {total} free{' on each' if devices > 1 else ''}"
    many = f" in {devices} processes" if devices > 1 else ""
    return f"CPU{many}, {memory_text(machine.host_free_bytes)} of memory free"


def _ways(subject: Subject, device: Device, devices: int, choice: Choice) -> str:
    sequences = -(-subject.sequences // devices)
    groups = f"{choice.owned} group{'' if choice.owned == 1 else 's'}" if choice.owned else "no group, as a standby"
    return ", ".join([groups, *in_words(choice.engine, device, sequences)])


def _seconds_line(subject: Subject, known: measured.Measured, choice: Choice) -> str:
    from spes_client.plan import apply_text, step_text

    step = step_text(subject, known, choice.owned)
    return f"a round's steps take about {step}; applying it {apply_text(subject, known)}" if step else ""
