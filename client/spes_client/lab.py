"""`spes lab`: compare training methods on one machine, in one process, without a network (docs/lab.md).

`run` trains what is not in the table yet, `table` and `plot` show what is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from spes_client import ui
from spes_client.presets import PRESETS
from spes_p2p.lab.settings import LAG_STARTS, METHODS, NANO, Settings, manifest_of, rounds_of, sweep
from spes_protocols.codec import from_plain
from spes_protocols.errors import UserError
from spes_protocols.manifest import Manifest, Model

if TYPE_CHECKING:
    from rich.table import Table

    from spes_p2p.lab.results import Cell, Finished, Results

T = TypeVar("T")

_MODELS = ("nano", "tiny")
_CODECS = ("fp32", "bf16", "int8", "int4")
_CACHE_BYTES = 4 * 2**30
_CHOICES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "method": ("NAME", ui.one_of(*METHODS), "spes, diloco, fedavg (Photon) or central"),
    "peers": ("N", ui.whole_number(1, 64), "peers, a divisor of the model's experts (default 4)"),
    "h": ("H", ui.whole_number(1, 10_000), "local steps in a round (default 20)"),
    "seed": ("S", ui.whole_number(0, 2**31), "first weights and order of the data (default 0)"),
    "lr": ("RATE", ui.number(1e-6, 1.0), "peak of the learning rate (default 0.003)"),
    "merge-alpha": ("A", ui.number(0.0, 1.0), "spes: strength of expert merging at its start (default 0: none)"),
    "merge-interval": ("STEPS", ui.whole_number(0, 2**31), "spes: steps between merges (default: every round)"),
    "merge-until": ("SHARE", ui.number(0.01, 1.0), "spes: share of the run at which merging ends, T_w (default 0.25)"),
    "bias": ("B", ui.number(0.0, 64.0), "spes: router bias towards owned experts at the start (default 0: none)"),
    "bias-until": (
        "SHARE",
        ui.number(0.01, 1.0),
        "spes: share of the run at which the bias has fallen to 0 (default 1)",
    ),
    "owner-lr": ("FACTOR", ui.number(0.01, 100.0), "spes: learning rate of owned experts, times this (default 1)"),
    "rotate": (
        "ROUNDS",
        ui.whole_number(0, 2**31),
        "spes: groups change their owners every so many rounds (default 0)",
    ),
    "outer-lr": ("RATE", ui.number(0.0, 10.0), "diloco: outer learning rate (default 0.7)"),
    "outer-momentum": ("M", ui.number(0.0, 0.999), "diloco: outer Nesterov momentum (default 0.9)"),
    "lag": ("0|1", ui.whole_number(0, 1), "spes, diloco: 1 trains a round while the last is agreed on (default 0)"),
    "lag-arrival": (
        "SHARE",
        ui.number(0.001, 1.0),
        "with lag 1: share of a round after which the last one's agreed state is there (default 1: its end)",
    ),
    "lag-start": (
        "FROM",
        ui.one_of(*LAG_STARTS),
        "with lag 1: a round begins from own, half or agreed (docs/lab.md; default own)",
    ),
    "lag-from": ("SHARE", ui.number(0.0, 1.0), "with lag 1: share of the run that is trained without (default 0)"),
}
"""Flags that may be repeated: metavar, type, meaning. Without a flag `Settings` has the value."""


def register(subparsers: Any) -> None:
    """Add `lab` and its verbs."""
    lab = subparsers.add_parser(
        "lab", help="compare SPES with DiLoCo, FedAvg and one machine, here", description=__doc__, epilog=ui.EXIT_CODES
    )
    lab.set_defaults(handler=lambda args: lab.error("no verb given"))
    verbs = lab.add_subparsers(metavar="VERB")
    _register_run(verbs)
    table = verbs.add_parser("table", help="show the finished runs, mean and spread over seeds")
    _out_flag(table)
    ui.json_flag(table)
    table.set_defaults(handler=_table)
    plot = verbs.add_parser("plot", help="draw the finished runs as a PNG (needs spes_p2p[lab])")
    _out_flag(plot)
    ui.flag(plot, "-o", "--output", metavar="FILE", env=None, default="", help="file to write (default OUT/lab.png)")
    ui.json_flag(plot)
    plot.set_defaults(handler=_plot)


def _register_run(verbs: Any) -> None:
    run = verbs.add_parser(
        "run",
        help="train every combination of the values given, those without a row yet",
        epilog=ui.EXIT_CODES,
        description="Flags marked * may be repeated: every combination of their values is trained.",
    )
    for name, (metavar, _, meaning) in _CHOICES.items():
        ui.flag(
            run, f"--{name}", action="append", metavar=metavar, env=_env(name), help=f"* {meaning}",
            required=name == "method",
        )  # fmt: skip
    ui.flag(
        run, "--model", env=_env("model"), type=ui.one_of(*_MODELS), default="nano",
        help="nano (0.6 M parameters) or tiny (the demo's 7.6 M; default nano)",
    )  # fmt: skip
    ui.flag(
        run, "--tokens", env=_env("tokens"), type=ui.whole_number(1, 2**50), metavar="T",
        help="tokens of all peers together, rounded down to whole rounds (default 512000)",
    )  # fmt: skip
    ui.flag(
        run, "--batch", env=_env("batch"), type=ui.whole_number(1, 65_536), metavar="N",
        help="sequences of one peer in a step (default 4)",
    )  # fmt: skip
    ui.flag(
        run, "--codec-shared", env=_env("codec-shared"), type=ui.one_of(*_CODECS), metavar="CODEC",
        help="codec of the shared part; other methods: of the whole model (default: int4 for spes, else fp32)",
    )  # fmt: skip
    ui.flag(
        run, "--codec-group", env=_env("codec-group"), type=ui.one_of(*_CODECS), metavar="CODEC",
        help="spes: codec of an owned group (default int8)",
    )  # fmt: skip
    _out_flag(run)
    ui.flag(
        run,
        "--data-dir",
        env=_env("data-dir"),
        metavar="DIR",
        default="",
        help="where the corpus is prepared (OUT/data)",
    )
    ui.flag(run, "--threads", type=ui.whole_number(1, 1024), default=1, help="CPU threads (default 1)")
    ui.json_flag(run)
    run.set_defaults(handler=_run)


def _env(name: str) -> str:
    return "SPES_LAB_" + name.upper().replace("-", "_")


def _out_flag(parser: argparse.ArgumentParser) -> None:
    ui.flag(parser, "--out", env=_env("out"), metavar="DIR", default="lab", help="directory of results (default lab)")


def _run(args: argparse.Namespace) -> int:
    from spes_p2p.data.corpus import sotu_data

    runs, model = _wanted(args), _model(args.model)
    results = _results(args)
    missing = [settings for settings in runs if not results.has(settings)]
    folder = Path(args.data_dir) if args.data_dir else results.folder / "data"
    folder = folder / f"sotu-{model.vocab_size}"
    with ui.progress() as report:
        data = sotu_data(folder, model.vocab_size, report=report)
    manifests = [manifest_of(settings, model, data) for settings in missing]  # all of them before the first is trained
    lines = _train_all(list(zip(missing, manifests, strict=True)), results, folder, args.threads)
    failed = 0
    for line in lines:
        if line is None:
            failed += 1
        elif not args.json:
            print(line, flush=True)
    if args.json:
        rows = [row for row in results.finished() if row.settings in runs]
        ui.print_json({"runs": [_plain_row(row) for row in rows], "failed": failed})
    elif not missing:
        print(f"all of it is there already; see: spes lab table --out {results.folder}")
    return ui.EXIT_CHECK_FAILED if failed else ui.EXIT_OK


def _train_all(
    runs: list[tuple[Settings, Manifest]], results: Results, folder: Path, threads: int
) -> Iterator[str | None]:
    """A line for each run as it is done, None for one that diverged.

    What another process is training is left for the end, and waited for then: it may come to nothing there.
    """
    for wait in (False, True):
        left = []
        for settings, manifest in runs:
            with results.claimed(settings, wait=wait) as is_free:
                line = _train(settings, manifest, results, folder, threads) if is_free else ""
            if is_free or wait:
                yield line if is_free else f"{_name(settings)}: trained by another process"
            else:
                left.append((settings, manifest))
        runs = left


def _name(settings: Settings) -> str:
    return f"{settings.variant}, seed {settings.seed}"


def _wanted(args: argparse.Namespace) -> list[Settings]:
    """The runs that the flags ask for."""
    choices: dict[str, Sequence[object]] = {"model": (args.model,)}
    for name, (_, convert, _) in _CHOICES.items():
        field = name.replace("-", "_")
        given = getattr(args, field)
        if given:
            choices[field] = [_converted(name, convert, text) for text in given]
    for field in ("tokens", "batch", "codec_shared", "codec_group"):
        value = getattr(args, field)
        if value:
            choices[field] = (value,)
    return sweep(choices)


def _converted(name: str, convert: Callable[[str], T], text: str) -> T:
    # Converted here rather than by argparse, which leaves the values of an environment variable's list alone.
    try:
        return convert(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"argument --{name}: {error}; see: spes lab run --help") from None


def _model(name: str) -> Model:
    return NANO if name == "nano" else from_plain(Model, PRESETS[name]["model"])


def _results(args: argparse.Namespace) -> Results:
    from spes_p2p.lab.results import Results

    return Results(Path(args.out))


def _train(settings: Settings, manifest: Manifest, results: Results, folder: Path, threads: int) -> str | None:
    """One run and its row; returns a line that says how it ended, None where it diverged, which is told here."""
    from spes_p2p.data.batches import TokenData
    from spes_p2p.lab.run import DivergedError, run

    sources = [str(folder.resolve())]
    length, rounds = manifest.model.sequence_length, rounds_of(manifest)
    tokens = TokenData(manifest.data, length, settings.seed, folder / "cache", sources, cache_bytes_max=_CACHE_BYTES)
    started = time.perf_counter()
    try:
        with contextlib.closing(tokens), ui.progress() as report:
            outcome = run(
                settings,
                manifest,
                tokens.sequences,
                tokens.heldout(),
                threads=threads,
                report=lambda done, loss: report(f"{_name(settings)}: loss {loss:.3f}", done / rounds),
            )
    except DivergedError as error:
        ui.warn(f"{_name(settings)}: {error}")
        return None
    seconds = time.perf_counter() - started
    results.add(settings, outcome, seconds)
    return f"{_name(settings)}: {outcome.bits_per_byte:.4f} bits per byte after {seconds:.0f} s"


def _plain_row(row: Finished) -> dict[str, Any]:
    plain = dataclasses.asdict(row)
    settings: dict[str, Any] = plain.pop("settings")
    return settings | plain


def _table(args: argparse.Namespace) -> int:
    from spes_p2p.lab.results import cells

    results = _results(args)
    found = cells(results.finished())
    if args.json:
        ui.print_json({"cells": [dataclasses.asdict(cell) for cell in found]})
        return ui.EXIT_OK
    if not found:
        raise UserError(f"no finished run in {results.path}; train some with: spes lab run --method spes")
    ui.print_rich(_rich_table(found))
    return ui.EXIT_OK


def _rich_table(found: Sequence[Cell]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method")
    for name in ("peers", "H", "tokens", "seeds", "bits per byte", "sent", "memory", "kept besides"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in found:
        settings = cell.settings
        table.add_row(
            Text(ui.one_line(settings.variant)),
            str(settings.peers),
            str(settings.h),
            ui.count_text(settings.tokens),
            str(len(cell.seeds)),
            f"{cell.mean:.4f} ± {cell.spread:.4f}" if len(cell.seeds) > 1 else f"{cell.mean:.4f}",
            ui.bytes_text(cell.sent_bytes),
            ui.bytes_text(cell.device_bytes),
            ui.bytes_text(cell.host_bytes),
        )
    return table


def _plot(args: argparse.Namespace) -> int:
    from spes_p2p.lab.plot import plot

    results = _results(args)
    path = Path(args.output) if args.output else results.folder / "lab.png"
    if results.folder.is_dir() or args.output:
        ui.check_writable(path)
    shown, picture = plot(results)
    ui.write_file(path, picture)
    if args.json:
        ui.print_json({"file": path, "runs": shown})
    else:
        print(f"wrote {path}: {shown} runs")
    return ui.EXIT_OK
