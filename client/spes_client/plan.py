"""`spes plan`: what training a model takes from a peer, for each way of computing it, and what this machine could do.

A preset, a manifest or a run --> `core.plan`'s figures --> a table, or JSON. Nothing is loaded or measured here.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from spes_client import measured, ui
from spes_client.machine import GPUS_MAX, Machine, look, memory_text
from spes_client.subject import Subject, subject_flags, subject_of
from spes_p2p.core import plan
from spes_p2p.core.choice import MICRO_BATCH_TOKENS, Choice, Wish, choose, combinations, in_words
from spes_p2p.core.engine import Engine, default_engine
from spes_p2p.core.plan import GIB, Device, DeviceMemory, device_memory

if TYPE_CHECKING:
    from rich.table import Table

CARDS_GIB = (8, 12, 16, 24, 32, 48, 80)
"""Cards that people have; a driver and a desktop keep some of each."""

CARD_SHARE = 0.96
LINE_BITS_PER_SECOND = 100e6


def register(subparsers: Any) -> None:
    """Add `plan`."""
    parser = subparsers.add_parser(
        "plan", help="what training a model takes from a peer, and what fits here",
        description="What training a model takes from a peer, for each combination of options, and which of them fit "
        "this machine's card. Nothing is loaded or measured.",
        epilog=ui.EXIT_CODES,
    )  # fmt: skip
    subject_flags(parser)
    ui.flag(parser, "--seq", type=ui.whole_number(8, 1_048_576), metavar="N", help="tokens of a sequence")
    ui.flag(
        parser, "--micro-batch", type=ui.whole_number(1, 65_536), metavar="N",
        help=f"sequences at a time (default: {MICRO_BATCH_TOKENS} tokens of them)",
    )  # fmt: skip
    ui.flag(
        parser, "--device", type=ui.one_of("cpu", "cuda"), default="cuda", env=None,
        help="what the table is for: cuda (default) or cpu",
    )  # fmt: skip
    ui.flag(
        parser, "--gpus", type=ui.whole_number(1, GPUS_MAX), default=1, metavar="N", env=None,
        help="GPUs of one machine that train together; the table is for each of them (default 1)",
    )  # fmt: skip
    ui.flag(parser, "--all", action="store_true", env=None, help="every combination of options, and cards of all sizes")
    ui.json_flag(parser)
    parser.set_defaults(handler=_plan)


def _plan(args: argparse.Namespace) -> int:
    subject = subject_of(args)
    if args.seq:
        subject = replace(subject, model=replace(subject.model, sequence_length=int(args.seq)))
    home = ui.home(args)
    machine, known = look(home), measured.load(home)
    device: Device = args.device
    length = subject.model.sequence_length
    at_once = int(args.micro_batch or min(subject.sequences, max(1, MICRO_BATCH_TOKENS // length)))
    devices = int(args.gpus)
    wish = Wish(micro_batch=None if args.micro_batch is None else int(args.micro_batch))
    here = choose_for(subject, machine, wish)
    if args.json:
        ui.print_json(_json(subject, device, devices, at_once, machine, here, known))
        return ui.EXIT_OK
    print(_title(subject))
    print(_what_the_table_says(subject, device, devices, at_once))
    print()
    ui.print_rich(_table(subject, device, devices, at_once, here, everything=args.all))
    print()
    if args.all:
        ui.print_rich(_cards_table(subject, devices))
        print()
    rows = _machine_rows(subject, machine, here) if devices == 1 else []
    ui.print_rich(ui.pairs_table(rows + _rows(subject, device, devices, known, machine)))
    return ui.EXIT_OK


def choose_for(subject: Subject, machine: Machine, wish: Wish) -> Choice:
    """What this machine would do in this run: at most as many groups as everybody's even share."""
    device = machine.device

    def beside(owned: int) -> int:
        return subject.host_bytes(owned, device) if device == "cpu" else 0

    return choose(
        subject.model, subject.groups, wish, device=device, device_bytes=machine.device_bytes(device), beside=beside,
        owned_max=subject.owned, sequences=subject.sequences,
    )  # fmt: skip


def memory_of(subject: Subject, engine: Engine, device: Device, at_once: int, devices: int = 1) -> DeviceMemory:
    """An even share of the groups, with so many sequences at a time on each device."""
    return device_memory(
        subject.model, subject.groups, subject.owned, replace(engine, micro_batch=at_once),
        sequences=max(devices * at_once, subject.sequences), device=device, devices=devices,
    )  # fmt: skip


def every_engine(device: Device, devices: int = 1) -> list[Engine]:
    """All combinations of the options of memory: the device's, and what gains nothing there (fp32 on a GPU)."""
    found = combinations(device, devices=devices) + combinations(device, Wish(frozen="fp32"), devices)
    return list(dict.fromkeys(found))


def _title(subject: Subject) -> str:
    parts = plan.cut(subject.model, subject.groups, 1)
    return (
        f"{ui.one_line(subject.name)}: {ui.count_text(parts.parameters)} parameters, "
        f"{ui.count_text(parts.shared.parameters)} shared, {ui.count_text(parts.owned.parameters)} in each of "
        f"{_many(subject.groups, 'group')}"
    )


def _what_the_table_says(subject: Subject, device: Device, devices: int, at_once: int) -> str:
    where = "on a GPU, which computes in bf16" if device == "cuda" else "on a CPU, which computes in fp32"
    if devices > 1:
        where = f"on each of {devices} GPUs" if device == "cuda" else f"in each of {devices} processes"
    sequences = f"{_many(at_once, 'sequence')} of {subject.model.sequence_length} tokens at a time"
    owners = "each" if subject.peers <= subject.groups else f"{subject.groups} of them"
    shares = f"{_many(subject.peers, 'peer')}, {_many(subject.owned, 'group')} for {owners}"
    return f"{shares}; {sequences};\nGiB {where}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _table(subject: Subject, device: Device, devices: int, at_once: int, here: Choice, *, everything: bool) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("frozen", "moments", "grads", "recomp"):
        table.add_column(name, no_wrap=True)
    for name in ("weights", "grads", "mom.", "sum", "act.", "logits", "other", "in all"):
        table.add_column(name, justify="right", no_wrap=True)
    for engine in every_engine(device, devices) if everything else _extremes(device, devices, here):
        memory = memory_of(subject, engine, device, at_once, devices)
        parts = (
            memory.weights, memory.gradients, memory.moments, memory.state, memory.activations, memory.logits,
            memory.workspace + memory.gathered, memory.total,
        )  # fmt: skip
        table.add_row(
            engine.frozen, engine.moments, engine.gradients, "yes" if engine.recompute else "no", *map(_gib, parts)
        )
    return table


def _extremes(device: Device, devices: int, here: Choice) -> list[Engine]:
    """The published way, the device's own, what this machine would take, and all savings at once."""
    smallest = Engine(frozen="int8", moments="int8", gradients="bf16" if devices == 1 else "fp32", recompute=True)
    chosen = replace(here.engine, micro_batch=None, compile=False, grouped=False)
    found = [Engine(), default_engine(device), *([chosen] if here.fits and devices == 1 else []), smallest]
    return list(dict.fromkeys(found))


def _cards_table(subject: Subject, devices: int) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("a card of" if devices == 1 else f"{devices} cards of", justify="right")
    table.add_column("groups", justify="right")
    table.add_column("needs", justify="right")
    table.add_column("with")
    for gib, choice in _cards(subject, devices):
        words = ", ".join(in_words(choice.engine, "cuda", subject.sequences)) or "nothing saved"
        cells = (str(choice.owned), memory_text(choice.memory.total), words) if choice.fits else ("", "", "too small")
        table.add_row(f"{gib} GiB", *cells)
    return table


def _cards(subject: Subject, devices: int) -> list[tuple[int, Choice]]:
    return [
        (
            gib,
            choose(
                subject.model, subject.groups, Wish(), device="cuda", device_bytes=int(gib * GIB * CARD_SHARE),
                owned_max=subject.owned, sequences=subject.sequences, devices=devices,
            ),
        )
        for gib in CARDS_GIB
    ]  # fmt: skip


def machine_text(machine: Machine) -> str:
    """This machine in a line."""
    card = "no GPU"
    if machine.card is not None:
        free, total = memory_text(machine.card.free_bytes), memory_text(machine.card.total_bytes)
        card = f"{ui.one_line(machine.card.name)}, {free} of {total} free"
    return (
        f"{card}; {memory_text(machine.host_free_bytes)} of {memory_text(machine.host_total_bytes)} of memory and "
        f"{ui.bytes_text(machine.disk_free_bytes)} of disk free"
    )


def choice_text(subject: Subject, choice: Choice, device: Device) -> str:
    """What a machine would do, and what that takes."""
    place = "on the card" if device == "cuda" else "beside what the peer itself takes"
    words = in_words(choice.engine, device, subject.sequences)
    ways = f"{', '.join(words)}; " if words else ""
    if choice.fits:
        groups = _many(choice.owned, "group") if choice.owned else "no group (a standby)"
        return f"{groups}; {ways}{memory_text(choice.memory.total)} {place}"
    return f"nothing: the least needs {memory_text(choice.memory.total)} {place}"


def _machine_rows(subject: Subject, machine: Machine, here: Choice) -> list[tuple[str, str]]:
    return [
        ("this machine", machine_text(machine)),
        ("fits here", choice_text(subject, here, machine.device)),
        ("", ""),
    ]


def _rows(
    subject: Subject, device: Device, devices: int, known: measured.Measured | None, machine: Machine
) -> list[tuple[str, str]]:
    """What does not depend on the options."""
    files, owned, share = subject.files(), subject.owned, subject.share()
    traffic = plan.traffic(files, **share)
    disk = plan.disk(subject.model, files, **share)
    host = subject.host_bytes(owned, device, devices)
    rounds = plan.rounds_of(subject.phases, subject.total_steps) if subject.phases and subject.total_steps else 0
    in_run = f"; {_amount(disk.log_round * rounds)} for {rounds} rounds" if rounds else ""
    seconds = 8 * max(traffic.sent, traffic.received) / LINE_BITS_PER_SECOND
    rows = [
        (
            "host memory",
            memory_text(host) + (" beside the above" if device == "cpu" else "") + _over(host, machine.host_free_bytes),
        ),
        (
            "disk",
            f"{_amount(disk.total)}: states {_amount(disk.states)}, contributions {_amount(disk.blobs)}, "
            f"trainer {_amount(disk.trainer)}{_over(disk.total, machine.disk_free_bytes)}",
        ),
        ("whole log", f"{_amount(disk.log_round)} a round{in_run}, for whoever archives it"),
        (
            "traffic",
            f"a round: own contribution {_amount(traffic.contribution)}, sent in all {_amount(traffic.sent)}, "
            f"received {_amount(traffic.received)}",
        ),
        ("", f"at 100 Mbit/s each way {seconds_text(seconds)}"),
        ("apply", apply_text(subject, known)),
    ]
    step = step_text(subject, known, owned) if devices == 1 else ""
    return rows + ([("a round's steps", step)] if step else [])


def _over(needed: int, free: int) -> str:
    return "; more than is free here" if needed > free else ""


def apply_seconds(subject: Subject, known: measured.Measured | None) -> float:
    """Seconds in which this machine applies a round, or one like the reference where nothing was measured."""
    rate = known.rates.apply_bytes if known else measured.REFERENCE_APPLY_BYTES_PER_SECOND
    return plan.apply_work_bytes(subject.model, subject.groups, peers=subject.senders) / rate


def apply_text(subject: Subject, known: measured.Measured | None) -> str:
    """The same in words, with where the rate comes from."""
    seconds = seconds_text(apply_seconds(subject, known))
    if known is None:
        rate = ui.bytes_text(measured.REFERENCE_APPLY_BYTES_PER_SECOND)
        return f"{seconds} a round at {rate}/s, a small server's rate; measure yours with: spes bench"
    rate = ui.bytes_text(known.rates.apply_bytes)
    return f"{seconds} a round at {rate}/s, measured here {measured.age_text(known.measured_at)}"


def tokens_per_second(subject: Subject, known: measured.Measured, owned: int) -> float | None:
    """Throughput of this machine in the run's first phase, AdamW included; None where no measurement says."""
    parts = plan.cut(subject.model, subject.groups, owned)
    batch = subject.sequences * subject.model.sequence_length
    return known.tokens_per_second(subject.model, subject.groups, owned, parts.trained, batch)


def step_text(subject: Subject, known: measured.Measured | None, owned: int) -> str:
    """How long a round's steps take here, as far as a measurement says; empty if none does."""
    rate = None if known is None else tokens_per_second(subject, known, owned)
    if known is None or rate is None or not subject.phases:
        return ""
    phase = subject.phases[0]
    step = known.step_of(subject.model)
    source = "measured" if step else f"reckoned from {known.steps[0].name}, measured"
    age = measured.age_text((step or known.steps[0]).measured_at)
    seconds = seconds_text(phase.steps * phase.batch_sequences * subject.model.sequence_length / rate)
    speed = f"{measured.rate_text(rate)} tokens/s"
    return f"{seconds} for {phase.steps} steps at {speed}, {source} on {known.rates.device} here {age}"


def seconds_text(seconds: float) -> str:
    """A duration for people."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 172_800 else f"{seconds / 86_400:.3g} days"


def _gib(count: float) -> str:
    return f"{count / GIB:.1f}" if count >= GIB / 2 or not count else f"{count / GIB:.2g}"


def _amount(count: float) -> str:
    return ui.bytes_text(count)


def _json(
    subject: Subject,
    device: Device,
    devices: int,
    at_once: int,
    machine: Machine,
    here: Choice,
    known: measured.Measured | None,
) -> dict[str, Any]:
    files, owned, model, share = subject.files(), subject.owned, subject.model, subject.share()
    parts = plan.cut(model, subject.groups, owned)
    options = []
    for engine in every_engine(device, devices):
        memory = memory_of(subject, engine, device, at_once, devices)
        options.append(_engine_json(engine) | _memory_json(memory) | {
            "fits_here": device == machine.device and memory.total <= machine.device_bytes(device, devices),
        })  # fmt: skip
    rounds = plan.rounds_of(subject.phases, subject.total_steps) if subject.phases and subject.total_steps else None
    disk = plan.disk(model, files, **share)
    traffic = plan.traffic(files, **share)
    return {
        "name": subject.name,
        "nodes": subject.peers,
        "groups": subject.groups,
        "groups_owned": owned,
        "parameters": parts.parameters,
        "parameters_shared": parts.shared.parameters,
        "parameters_trained": parts.trained,
        "sequence_length": model.sequence_length,
        "sequences_at_a_time": at_once,
        "device": device,
        "devices": devices,
        "options": options,
        "host_gib": subject.host_bytes(owned, device, devices) / GIB,
        "disk_bytes": asdict(disk) | {"total": disk.total},
        "log_run_bytes": None if rounds is None else disk.log_round * rounds,
        "rounds": rounds,
        "traffic_bytes_per_round": asdict(traffic),
        "apply_seconds": apply_seconds(subject, known),
        "apply_rate_measured_here": known is not None,
        "tokens_per_second": None if known is None else tokens_per_second(subject, known, owned),
        "step_flops_per_token": plan.step_flops_per_token(model, subject.groups, owned),
        "machine": asdict(machine),
        "here": _choice_json(here),
        "cards": [{"card_gib": gib} | _choice_json(choice) for gib, choice in _cards(subject, devices)],
    }


def _engine_json(engine: Engine) -> dict[str, Any]:
    return {
        "frozen": engine.frozen,
        "moments": engine.moments,
        "gradients": engine.gradients,
        "recompute": engine.recompute,
    }


def _memory_json(memory: DeviceMemory) -> dict[str, float]:
    """`total_gib`: weights, gradients and moments; `device_gib`: with all that depends on the batch."""
    return {
        "weights_gib": memory.weights / GIB,
        "gradients_gib": memory.gradients / GIB,
        "moments_gib": memory.moments / GIB,
        "total_gib": memory.state / GIB,
        "activations_gib": memory.activations / GIB,
        "logits_gib": memory.logits / GIB,
        "other_gib": (memory.workspace + memory.gathered) / GIB,
        "device_gib": memory.total / GIB,
    }


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {"fits": choice.fits, "groups_owned": choice.owned, "micro_batch": choice.engine.micro_batch} | (
        _engine_json(choice.engine) | _memory_json(choice.memory)
    )
