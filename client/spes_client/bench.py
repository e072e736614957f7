"""`spes bench`: measure this machine in about a minute, and keep the figures for `spes plan` and `spes-join`.

What needs torch is measured by `spes_p2p.train.bench`, a process of its own; disk, hashing and `apply` here, with
files in a temporary directory of the home. Ctrl-C ends both and leaves nothing but what was measured before.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from spes_client import machine, measured, ui
from spes_client.subject import Subject, subject_flags, subject_of
from spes_protocols.codec import to_plain
from spes_protocols.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from spes_p2p.delta.numeric import FloatArray

SECONDS = 45.0
"""For what torch measures; a model that is slow to set up takes longer."""

SECONDS_MAX = 300.0
"""After this the measuring process is ended: this machine is too slow, or too busy, for that model."""

MEMORY_SHARE = 0.5
_DISK_BYTES = 256 * 1024**2
_PIECE_BYTES = 4 * 1024**2
_SMALL_WRITES = 20
_HASH_SECONDS = 1.0
_PEERS = 4
_APPLY_MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "sequence_length": 128,
}
"""30 million parameters: large enough that a round's fixed cost is lost in it."""


def register(subparsers: Any) -> None:
    """Add `bench`."""
    parser = subparsers.add_parser(
        "bench", help="measure this machine, for spes plan and spes-join", description=__doc__, epilog=ui.EXIT_CODES
    )
    subject_flags(parser)
    ui.flag(
        parser, "--device", type=ui.one_of("auto", "cpu", "cuda"), default="auto",
        help="where to train: auto (a GPU if there is one), cpu or cuda",
    )  # fmt: skip
    ui.flag(
        parser, "--threads", type=ui.whole_number(1, 1024), default=max(1, (os.cpu_count() or 2) // 2), metavar="N",
        help="CPU threads, as for spes-join (default: half the cores)",
    )  # fmt: skip
    ui.flag(parser, "--again", action="store_true", env=None, help="measure also what was measured before")
    ui.json_flag(parser)
    parser.set_defaults(handler=_bench)


def _bench(args: argparse.Namespace) -> int:
    subject, home = subject_of(args, otherwise="1b"), ui.home(args)
    known = measured.load(home)
    device = machine.device_asked(args.device)
    if known is not None and device not in (None, known.rates.device):
        known = None  # of another device
    if args.again or known is None or known.step_of(subject.model) is None:
        with ui.progress() as report:
            known = _measure(args, subject, home, known, report)
        measured.save(home, known)
    if args.json:
        ui.print_json(_json(known, home))
        return ui.EXIT_OK
    ui.print_rich(_rates_table(known))
    print()
    ui.print_rich(_steps_table(known))
    print(f"\nkept in {ui.tilde(home / measured.FILE)}; measure anew with: spes bench --again")
    return ui.EXIT_OK


def _measure(
    args: argparse.Namespace, subject: Subject, home: Path, known: measured.Measured | None,
    report: Callable[[str, float], None],
) -> measured.Measured:  # fmt: skip
    """All of it, or only the step where the machine's rates are known and not to be measured again."""
    from spes_p2p.store.files import make_directory

    make_directory(home)
    found = _torch_part(args, subject, home, report)
    now = time.time()
    step = measured.Step(
        name=subject.name,
        model=subject.model,
        groups=subject.groups,
        owned=subject.owned,
        seconds_per_token=found["seconds_per_token"],
        tokens_at_once=found["tokens_at_once"],
        how=found["how"],
        measured_at=now,
    )
    if known is not None and not args.again and known.rates.are_of(found["device"], int(args.threads)):
        return known.with_step(step)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=home) as folder:
        report("disk", 0.8)
        write, read, fsync = disk_rates(Path(folder))
        report("hashing", 0.87)
        hashing = hash_rate()
        report("applying a round", 0.9)
        apply = apply_rate(Path(folder))
    rates = measured.Rates(
        device=found["device"],
        device_name=found["device_name"],
        threads=int(args.threads),
        matmul_flops=found["matmul_flops"],
        adamw_elements=found["adamw_elements"],
        apply_bytes=apply,
        disk_write_bytes=write,
        disk_read_bytes=read,
        fsync_seconds=fsync,
        hash_bytes=hashing,
    )
    # Steps that were measured beside other rates say nothing beside these.
    return measured.Measured(rates=rates, measured_at=now).with_step(step)


def _torch_part(
    args: argparse.Namespace, subject: Subject, home: Path, report: Callable[[str, float], None]
) -> dict[str, Any]:
    """What the process with torch found. Raises `UserError` where it found nothing."""
    here = machine.look(home)
    device = here.device if args.device == "auto" else args.device
    request = {
        "model": to_plain(subject.model),
        "groups": subject.groups,
        "owned": subject.owned,
        "device": args.device,
        "threads": int(args.threads),
        "memory_bytes": int(MEMORY_SHARE * here.device_bytes(device)),
        "seconds": SECONDS,
    }
    last: dict[str, Any] = {}
    with _process(json.dumps(request)) as lines:
        for number, line in enumerate(lines):
            last = _parsed(line)
            if "progress" in last:
                report(str(last["progress"]), min(0.7, 0.1 + 0.15 * number))
    if "result" in last:
        result: dict[str, Any] = last["result"]
        return result
    why = last.get("failed") or f"no result within {SECONDS_MAX:.0f} s, or the process was ended"
    raise UserError(f"{subject.name} cannot be measured here: {why}; measure a smaller model, such as --preset tiny")


@contextlib.contextmanager
def _process(request: str) -> Iterator[IO[str]]:
    """The measuring process' output; it is ended when the block ends, and after `SECONDS_MAX` in any case."""
    from spes_p2p.peer.trainer_link import in_order_of_cards

    command = [sys.executable, "-m", "spes_p2p.train.bench"]
    # Its own session: Ctrl-C in the terminal is for this program, which ends the other.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        stderr=None if ui.debugging() else subprocess.DEVNULL, env=in_order_of_cards(os.environ),
    )  # fmt: skip
    watch = threading.Timer(SECONDS_MAX, process.kill)
    watch.daemon = True
    try:
        watch.start()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(request)
        yield process.stdout
    finally:
        watch.cancel()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def disk_rates(folder: Path) -> tuple[float, float, float]:
    """(bytes a second written and synced, bytes a second read past the cache, median seconds of a small synced write).

    Raises `UserError` where the disk is full.
    """
    from spes_p2p.store.files import disk_errors, require_space

    size = _DISK_BYTES
    require_space(folder, 2 * size)
    path, piece = folder / "large", os.urandom(_PIECE_BYTES)
    with disk_errors(path):
        started = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(size // _PIECE_BYTES):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        write = size / (time.perf_counter() - started)
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            while file.read(_PIECE_BYTES):
                pass
            read = size / (time.perf_counter() - started)
        times = []
        for number in range(_SMALL_WRITES):
            started = time.perf_counter()
            with (folder / f"small{number}").open("wb") as file:
                file.write(piece[:4096])
                file.flush()
                os.fsync(file.fileno())
            times.append(time.perf_counter() - started)
    path.unlink()
    return write, read, statistics.median(times)


def hash_rate() -> float:
    """Bytes of SHA-256 a second on one core, in leaves of a state's size."""
    piece, done, started = os.urandom(_PIECE_BYTES), 0, time.perf_counter()
    while True:
        hashlib.sha256(piece).digest()
        done += len(piece)
        taken = time.perf_counter() - started
        if taken >= _HASH_SECONDS:
            return done / taken


def apply_rate(folder: Path) -> float:
    """Bytes of `core.plan.apply_work_bytes` a second: a real round of four peers, from files to files.

    Raises `UserError` where the disk is full.
    """
    import numpy as np

    from spes_p2p.core.plan import apply_work_bytes
    from spes_p2p.core.tensors import section_specs, tensor_specs
    from spes_p2p.delta.apply import apply_round
    from spes_p2p.delta.codecs import Decoder, write_section
    from spes_p2p.store.files import require_space
    from spes_p2p.store.states import StateStore
    from spes_protocols.manifest import Model
    from spes_protocols.messages import SHARED, group_section

    model = Model(**_APPLY_MODEL)
    specs = tensor_specs(model, _PEERS)
    store = StateStore(folder / "states", [(spec.name, spec.shape) for spec in specs])
    require_space(folder, 4 * store.layout.file_bytes)
    random = np.random.default_rng(0)

    def values(count: int) -> FloatArray:
        return random.standard_normal(count, dtype=np.float32) * np.float32(1e-3)

    def section(name: str, codec: str, path: Path) -> Decoder:
        found = section_specs(model, _PEERS, name)
        write_section(found, {spec.name: values(spec.size).reshape(spec.shape) for spec in found}, codec, path)
        return Decoder(path, found, codec)

    with store.writer(0) as writer:
        for spec in specs:
            writer.add(spec.name, values(spec.size).reshape(spec.shape))
        writer.commit()
    shared = [(f"peer{n}", 1, section(SHARED, "int4", folder / f"shared{n}")) for n in range(_PEERS)]
    groups = {n: section(group_section(n), "int8", folder / f"group{n}") for n in range(_PEERS)}
    started = time.perf_counter()
    with store.writer(1) as writer:
        apply_round(specs, store.read(0), shared, groups, write=writer.add)
        writer.commit()
    return apply_work_bytes(model, _PEERS, peers=_PEERS) / (time.perf_counter() - started)


def _rates_table(known: measured.Measured) -> Table:
    rates = known.rates
    dtype = "bf16" if rates.device == "cuda" else "fp32"
    where = f"{ui.one_line(rates.device_name)}, {rates.threads} CPU thread{'' if rates.threads == 1 else 's'}"
    rows = [
        ("measured", f"{measured.age_text(known.measured_at)} on {where}"),
        ("matrix products", f"{ui.count_text(rates.matmul_flops)}FLOP/s in {dtype}"),
        ("AdamW", f"{ui.count_text(rates.adamw_elements)} parameters/s"),
        ("apply", f"{ui.bytes_text(rates.apply_bytes)}/s"),
        ("disk", f"{ui.bytes_text(rates.disk_write_bytes)}/s written, {ui.bytes_text(rates.disk_read_bytes)}/s read"),
        ("", f"{1000 * rates.fsync_seconds:.3g} ms until a small file is safe"),
        ("hashing", f"{ui.bytes_text(rates.hash_bytes)}/s"),
    ]
    return ui.pairs_table(rows)


def _steps_table(known: measured.Measured) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("model")
    for name in ("tokens/s", "MFU", "at once"):
        table.add_column(name, justify="right")
    table.add_column("measured")
    table.add_column("by")
    for step in known.steps:
        table.add_row(
            Text(ui.one_line(step.name)), measured.rate_text(1 / step.seconds_per_token), f"{known.mfu(step):.1%}",
            str(step.tokens_at_once), measured.age_text(step.measured_at), Text(ui.one_line(step.how)),
        )  # fmt: skip
    return table


def _json(known: measured.Measured, home: Path) -> dict[str, Any]:
    steps = [
        asdict(step) | {"tokens_per_second": 1 / step.seconds_per_token, "mfu": known.mfu(step)} for step in known.steps
    ]
    return {
        "version": measured.VERSION,
        "file": home / measured.FILE,
        "measured_at": known.measured_at,
        "age_seconds": max(0.0, time.time() - known.measured_at),
        "rates": asdict(known.rates),
        "steps": steps,
    }
