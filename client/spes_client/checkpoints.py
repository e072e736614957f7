"""`spes export` and `spes eval`: a model out of a run as a checkpoint that others' tools load, and how good it is.

run directory, or state file --export--> checkpoint --eval--> bits per byte of texts, scores of benchmarks
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client import ui
from spes_protocols.errors import UserError

if TYPE_CHECKING:
    from spes_client.evaluation import Text
    from spes_p2p.model.harness import Score, TaskSet

_ROUND_MAX = 2**53


def register(subparsers: Any) -> None:
    """Add `export` and `eval`."""
    _register_export(subparsers)
    _register_eval(subparsers)


def _register_export(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="write a run's model as a checkpoint for transformers",
        description="Write a state of a run as a checkpoint that transformers loads as OLMoE or Qwen3-MoE.",
        epilog=ui.EXIT_CODES,
    )
    parser.add_argument(
        "source", type=Path, metavar="RUN_OR_STATE", help="a run's directory, the --dir of spes-join, or a state file"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    ui.flag(
        parser, "--round", type=ui.whole_number(0, _ROUND_MAX), metavar="N", env=None,
        help="of a run: the state that round N starts from (default: the newest)",
    )  # fmt: skip
    ui.flag(parser, "--manifest", metavar="FILE", default="", help="of a state file: its run's signed manifest")
    ui.flag(parser, "--tokenizer", type=Path, metavar="FILE", help="the run's tokenizer, where its cache lacks it")
    ui.flag(parser, "--allow-source", action="append", metavar="PREFIX", help="let data under this path or URL be read")
    ui.flag(parser, "--work", type=Path, metavar="DIR", help="where to compute states (default: in the run's own)")
    _threads_flag(parser)
    ui.json_flag(parser)
    parser.set_defaults(handler=_export)


def _register_eval(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="measure an exported checkpoint: benchmarks, and bits per byte of texts",
        description="Measure an exported checkpoint: with lm-evaluation-harness on benchmarks, and in bits per byte on "
        "texts. Without --text and --heldout on the benchmarks of the SPES paper.",
        epilog=ui.EXIT_CODES,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="directory that spes export wrote")
    ui.flag(
        parser, "--tasks", action="append", metavar="TASK",
        help="task of the harness, or the YAML file of one; may be repeated (default: the paper's)",
    )  # fmt: skip
    ui.flag(
        parser, "--fewshot", type=ui.whole_number(0, 100), metavar="N",
        help="examples before each question of --tasks (default: each task's own)",
    )  # fmt: skip
    ui.flag(parser, "--limit", type=ui.whole_number(1, 10**9), metavar="N", help="only N questions of each task")
    ui.flag(
        parser, "--batch-size", type=ui.whole_number(1, 4096), metavar="N", default=8,
        help="questions at a time (default 8)",
    )  # fmt: skip
    ui.flag(
        parser, "--device", type=ui.one_of("auto", "cpu", "cuda"), default="auto",
        help="where the benchmarks run: auto (a GPU if there is one), cpu or cuda",
    )  # fmt: skip
    ui.flag(
        parser, "--text", action="append", metavar="NAME=FILE",
        help="measure bits per byte of this text (txt, jsonl or parquet); may be repeated",
    )  # fmt: skip
    ui.flag(parser, "--text-key", metavar="KEY", default="text", help="key or column of the text (default text)")
    ui.flag(parser, "--heldout", type=Path, metavar="RUN", help="measure the held-out text of this run's directory")
    ui.flag(parser, "--allow-source", action="append", metavar="PREFIX", help="let data under this path or URL be read")
    _threads_flag(parser)
    ui.json_flag(parser)
    parser.set_defaults(handler=_eval)


def _threads_flag(parser: ui.Parser) -> None:
    ui.flag(
        parser, "--threads", type=ui.whole_number(1, 1024), metavar="N", default=min(2, os.cpu_count() or 1),
        help="CPU threads (default 2)",
    )  # fmt: skip


# ---- export ---------------------------------------------------------------------------------------------------------


def _export(args: argparse.Namespace) -> int:
    from spes_p2p.replay.export import export, export_file
    from spes_p2p.store.rundir import resolve_run_dir

    common = {"tokenizer": args.tokenizer, "allow_sources": args.allow_source or ()}
    with ui.progress() as report:
        if args.source.is_file():
            if args.round is not None:
                raise UserError(f"{args.source} is one state: leave out --round, or give its run's directory")
            manifest = _manifest_of(args).record
            number, root = None, export_file(args.source, manifest, args.out, report=report, **common)
        else:
            if args.manifest:
                raise UserError("--manifest goes with a state file: a run's directory has its own")
            run = resolve_run_dir(args.source)
            number, root = export(
                run, args.round, args.out, work=args.work, threads=args.threads, report=report, **common
            )  # fmt: skip
    if args.json:
        ui.print_json({"out": args.out, "round": number, "state_root": root})
    else:
        what = f"the state before round {number}" if number is not None else f"the state in {args.source}"
        print(f"wrote {args.out}: {what}, root {root.hex()}; measure it with: spes eval {args.out}")
    return ui.EXIT_OK


def _manifest_of(args: argparse.Namespace) -> Any:
    """The signed manifest of a state file: the one given, that of the run it lies in, or the one beside it."""
    from spes_client.run_commands import read_signed
    from spes_p2p.store.first_state import SUFFIX
    from spes_p2p.store.rundir import RunDir

    path = args.source.absolute()
    if args.manifest:
        return read_signed(Path(args.manifest))
    if (path.parent.parent / "manifest").is_file():
        return RunDir.open(path.parent.parent).manifest
    beside = path.with_name(path.name.removesuffix(SUFFIX) + ".spes")
    if path.name.endswith(SUFFIX) and beside.is_file():
        return read_signed(beside)
    raise UserError(f"{args.source} does not say of which model it is: give its run's manifest with --manifest FILE")


# ---- eval -----------------------------------------------------------------------------------------------------------


def _eval(args: argparse.Namespace) -> int:
    from spes_client.evaluation import heldout_text, measure, text_of
    from spes_p2p.model.export import read_checkpoint

    texts_wanted = bool(args.text) or args.heldout is not None
    sets = _task_sets(args) if args.tasks or not texts_wanted else ()
    checkpoint = read_checkpoint(args.checkpoint)
    with ui.progress() as report:
        texts = [text_of(pair, args.text_key, checkpoint) for pair in args.text or ()]
        if args.heldout is not None:
            texts.append(heldout_text(args.heldout, checkpoint, args.allow_source or (), report))
        measured = [(text, measure(text, checkpoint, args.threads, report)) for text in texts]
    scores = _scores(args, sets) if sets else []
    if args.json:
        ui.print_json(
            {
                "texts": [_text_json(text, value) for text, value in measured],
                "tasks": [vars(score) for score in scores],
            }
        )
        return ui.EXIT_OK
    _print(measured, scores)
    return ui.EXIT_OK


def _task_sets(args: argparse.Namespace) -> tuple[TaskSet, ...]:
    """What to run; now, so that a missing harness or file is said before anything is measured."""
    from spes_p2p.model.harness import PAPER_TASKS, TaskSet, require_harness

    require_harness()
    if not args.tasks:
        if args.fewshot is not None:
            raise UserError("--fewshot goes with --tasks: the paper's tasks have their own numbers of examples")
        return PAPER_TASKS
    return (TaskSet(tasks=tuple(args.tasks), fewshot=args.fewshot),)


def _scores(args: argparse.Namespace, sets: tuple[TaskSet, ...]) -> list[Score]:
    from spes_p2p.model.harness import run_harness

    return run_harness(
        args.checkpoint,
        sets,
        limit=args.limit,
        batch_size=args.batch_size,
        device=args.device,
        threads=args.threads,
    )


def _text_json(text: Text, value: float) -> dict[str, Any]:
    return {"name": text.name, "bytes": text.bytes, "tokens": int(text.tokens.size), "bits_per_byte": value}


def _print(measured: list[tuple[Text, float]], scores: list[Score]) -> None:
    from rich.table import Table
    from rich.text import Text as Plain  # names of texts and tasks are no markup

    if measured:
        table = Table("text", box=None, pad_edge=False)
        for column in ("bytes", "tokens", "bits per byte"):
            table.add_column(column, justify="right")
        for text, value in measured:
            name = Plain(ui.one_line(text.name))
            table.add_row(name, ui.bytes_text(text.bytes), ui.count_text(int(text.tokens.size)), f"{value:.4f}")
        ui.print_rich(table)
    if scores:
        table = Table("task", "metric", box=None, pad_edge=False)
        for column in ("examples", "questions", "value", "error"):
            table.add_column(column, justify="right")
        for score in scores:
            error = "" if score.stderr is None else f"{score.stderr:.4f}"
            names = (Plain(ui.one_line(name)) for name in (score.task, score.metric))
            table.add_row(*names, str(score.fewshot), str(score.questions), f"{score.value:.4f}", error)
        ui.print_rich(table)
