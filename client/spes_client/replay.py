"""`spes-replay`: a run's log offline. Verify it, show its rounds, export a state, fetch a log, ask what-if.

    fetch --> a log on disk --> verify | show | export | what-if

Each verb imports what it needs when it runs; `verify`, `show` and `fetch` need no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client import homes, ui
from spes_protocols.errors import IntegrityError, UserError

if TYPE_CHECKING:
    from spes_p2p.replay.problems import Problem
    from spes_p2p.replay.show import Row
    from spes_p2p.replay.verify import Tally
    from spes_p2p.store.rundir import RunDir

_ROUND_MAX = 2**53


def build_parser() -> ui.Parser:
    """The command line of `spes-replay`."""
    parser = ui.Parser(
        prog="spes-replay",
        description="Work on the log of a run: check it, show it, take a model out of it, change it.",
        epilog=ui.EXIT_CODES,
    )
    verbs = parser.add_subparsers(metavar="COMMAND")
    _register_verify(verbs)
    _register_show(verbs)
    _register_export(verbs)
    _register_fetch(verbs)
    _register_what_if(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `spes-replay`."""
    return ui.run_program(lambda: _dispatch(sys.argv[1:] if argv is None else argv))


def _dispatch(argv: Sequence[str]) -> int:
    parser = build_parser()
    args: argparse.Namespace = parser.parse_args(argv)
    if "handler" not in args:
        parser.error("no command given")
    code: int = args.handler(args)
    return code


def _add(verbs: Any, name: str, what: str, *, recomputes: bool = False) -> ui.Parser:
    """A verb on a log: its directory, where and on how many threads states are computed, --json."""
    parser: ui.Parser = verbs.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("dir", type=Path, metavar="DIR", help="a run's directory, or the --dir of spes-join")
    if recomputes:
        ui.flag(parser, "--work", type=Path, metavar="DIR", help="where to compute states (default: in the run's own)")
        ui.flag(
            parser, "--threads", type=ui.whole_number(1, 1024), metavar="N", default=min(2, os.cpu_count() or 1),
            help="CPU threads (default 2)",
        )  # fmt: skip
    ui.json_flag(parser)
    return parser


def _round_flag(parser: ui.Parser, what: str, *, name: str = "--round", required: bool = False) -> None:
    number = ui.whole_number(0, _ROUND_MAX)
    ui.flag(parser, name, type=number, metavar="N", env=None, required=required, help=what)


def _source_flag(parser: ui.Parser) -> None:
    ui.flag(parser, "--allow-source", action="append", metavar="PREFIX", help="let data under this path or URL be read")


def _register_verify(verbs: Any) -> None:
    parser = _add(
        verbs, "verify", "check every signature, vote and hash, and compute every state again", recomputes=True
    )
    _round_flag(parser, "begin with the stored state of round N, for a log without older blobs", name="--from-snapshot")
    ui.flag(parser, "--all", action="store_true", env=None, help="go on after the first problem")
    parser.set_defaults(handler=_verify)


def _register_show(verbs: Any) -> None:
    parser = _add(verbs, "show", "show the rounds: members, tokens, loss, norms, owners, bytes, votes")
    _round_flag(parser, "everything about round N")
    ui.flag(parser, "--abandoned", action="store_true", env=None, help="what a reset or a better branch took back")
    parser.set_defaults(handler=_show)


def _register_export(verbs: Any) -> None:
    parser = _add(verbs, "export", "write a state as a checkpoint that transformers loads as OLMoE", recomputes=True)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    _round_flag(parser, "the state that round N starts from (default: the newest)")
    ui.flag(parser, "--tokenizer", type=Path, metavar="FILE", help="the run's tokenizer, where its cache lacks it")
    _source_flag(parser)
    parser.set_defaults(handler=_export)


def _register_fetch(verbs: Any) -> None:
    parser = _add(verbs, "fetch", "download a run's log from its peers; what is there already is kept")
    ui.flag(parser, "--peer", action="append", metavar="ADDR", required=True, help="a peer of the run; may be repeated")
    parser.set_defaults(handler=_fetch)


def _register_what_if(verbs: Any) -> None:
    parser = _add(verbs, "what-if", "apply a round again with a change and compare the held-out loss", recomputes=True)
    _round_flag(parser, "the round to change", required=True)
    ui.flag(parser, "--without", metavar="PEER", env=None, help="leave out this peer: its id or the end of it")
    ui.flag(
        parser,
        "--alpha",
        type=ui.number(0.0, 1.0),
        metavar="A",
        env=None,
        help="merging.alpha instead of the manifest's",
    )
    _source_flag(parser)
    parser.set_defaults(handler=_what_if)


def _run(args: argparse.Namespace) -> RunDir:
    """The run at DIR. Raises `UserError`, `IntegrityError`."""
    from spes_p2p.store.rundir import resolve_run_dir

    homes.require_directory(args.dir)
    return resolve_run_dir(args.dir)


# ---- verify -----------------------------------------------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    from spes_p2p.replay.problems import Problem
    from spes_p2p.replay.verify import Tally, Verifier

    try:
        run = _run(args)
    except IntegrityError as error:
        problem = Problem(round=0, file=Path(error.where), check=error.check, detail=error.detail)
        return _report(args, args.dir, "", Tally(), [problem])
    problems: list[Problem] = []
    with ui.progress() as report:
        verifier = Verifier(
            run, from_snapshot=args.from_snapshot, work=args.work, threads=args.threads, report=report
        )  # fmt: skip
        with contextlib.closing(verifier.problems()) as found:
            for problem in found:
                problems.append(problem)
                if not args.all:
                    break
    return _report(args, run.path, run.run_id.hex(), verifier.tally, problems)


def _report(args: argparse.Namespace, folder: Path, run_id: str, tally: Tally, problems: list[Problem]) -> int:
    """Print what verifying gave; returns the exit code."""
    from spes_p2p.replay.degraded import notes

    noted = list(notes(tally.degraded, tally.double_votes))
    inside = [dataclasses.replace(problem, file=_relative(problem.file, folder)) for problem in problems]
    stopped = bool(problems) and not args.all
    if args.json:
        ui.print_json(
            {
                "ok": not problems,
                "dir": folder,
                "run_id": run_id,
                "from_snapshot": args.from_snapshot,
                "problems": [dataclasses.asdict(problem) for problem in inside],
                "stopped_at_first_problem": stopped,
                "notes": noted,
                **dataclasses.asdict(tally),
            }
        )
    else:
        for problem in inside:
            print(ui.one_line(str(problem)))
        for line in noted:
            print(f"note: {ui.one_line(line)}")
        for line in tally.unchecked:
            print(f"not checked: {ui.one_line(line)}")
        counts = [(tally.rounds, "round"), (tally.contributions, "contribution"), (tally.state_roots, "state root")]
        line = ", ".join(f"{n} {what}" + "s" * (n != 1) for n, what in [*counts, (len(problems), "problem")])
        hint = "; stopped there, --all goes on" if stopped else ""
        print(f"{'failed' if problems else 'verified'}: {line}{hint}")
    return ui.EXIT_CHECK_FAILED if problems else ui.EXIT_OK


def _relative(file: Path, folder: Path) -> Path:
    return file.relative_to(folder) if file.is_relative_to(folder) else file


# ---- show -------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    from spes_client import replay_tables
    from spes_p2p.replay.show import rows

    run = _run(args)
    if args.abandoned:
        return _show_abandoned(args, run)
    with ui.progress() as report:
        found = list(rows(run, only_round=args.round, report=report))
    if args.round is not None and not found:
        raise UserError(f"the ledger has no record of round {args.round}; see its rounds: spes-replay show {args.dir}")
    if args.json:
        name = run.manifest.record.name
        rounds = [dataclasses.asdict(row) for row in found]
        ui.print_json({"dir": run.path, "run_id": run.run_id, "name": name, "rounds": rounds})
        return _show_damaged(args, found)
    pictures = [replay_tables.overview(found, ui.columns())] if args.round is None else replay_tables.details(found)
    for picture in pictures:
        ui.print_rich(picture)
    return _show_damaged(args, found)


def _show_damaged(args: argparse.Namespace, rows: Sequence[Row]) -> int:
    """The last words where a blob is not what the ledger says, and the exit code."""
    damaged = {part.blob: row.round for row in rows for given in row.given for part in given.parts if part.damaged}
    if not damaged:
        return ui.EXIT_OK
    rounds = ", ".join(map(str, dict.fromkeys(damaged.values())))
    what = "1 blob is" if len(damaged) == 1 else f"{len(damaged)} blobs are"
    command = shlex.join(["spes-replay", "verify", "--all", str(args.dir)])
    print(
        ui.one_line(f"error: {what} damaged, of round {rounds}; see what else is wrong with: {command}"),
        file=sys.stderr,
    )
    return ui.EXIT_CHECK_FAILED


def _show_abandoned(args: argparse.Namespace, run: RunDir) -> int:
    from spes_client import replay_tables
    from spes_p2p.replay.taken_back import taken_back

    with ui.progress() as report:
        found = [record for record in taken_back(run, report) if args.round in (None, record.round)]
    if args.json:
        records = [dataclasses.asdict(record) for record in found]
        ui.print_json({"dir": run.path, "run_id": run.run_id, "abandoned": records})
    elif found:
        ui.print_rich(replay_tables.abandoned(found))
    else:
        print("nothing was taken back")
    return ui.EXIT_OK


# ---- export -----------------------------------------------------------------------------------------------------


def _export(args: argparse.Namespace) -> int:
    from spes_p2p.replay.export import export

    run = _run(args)
    with ui.progress() as report:
        number, root = export(
            run,
            args.round,
            args.out,
            tokenizer=args.tokenizer,
            allow_sources=args.allow_source or (),
            work=args.work,
            threads=args.threads,
            report=report,
        )
    if args.json:
        ui.print_json({"out": args.out, "round": number, "state_root": root})
    else:
        print(f"wrote {args.out}: the state before round {number}, root {root.hex()}")
    return ui.EXIT_OK


# ---- fetch ------------------------------------------------------------------------------------------------------


def _fetch(args: argparse.Namespace) -> int:
    from spes_client.replay_fetch import fetch

    def say(line: str) -> None:
        print(ui.one_line(line), file=sys.stderr)

    with ui.progress() as report:
        result = asyncio.run(fetch(args.dir, args.peer, say, report))
    if args.json:
        ui.print_json(dataclasses.asdict(result))
    else:
        if result.taken_back:
            command = shlex.join(["spes-replay", "show", "--abandoned", str(result.dir)])
            print(f"taken back: {result.taken_back} records that another branch goes before; see them with: {command}")
        for missing in result.missing:
            whose = f"{missing.section} of {missing.peer}" + (", refused" if missing.refused else "")
            print(ui.one_line(f"missing: round {missing.round}, {whose}: {missing.reason}"))
        snapshot = "no snapshot" if result.snapshot is None else f"the state of round {result.snapshot}"
        print(
            f"{result.dir}: {result.rounds} rounds, {result.blobs} blobs ({result.fetched} of them new, "
            f"{len(result.missing)} missing), {snapshot}\nverify it with: {result.next_command}"
        )
    return ui.EXIT_NETWORK if any(not missing.refused for missing in result.missing) else ui.EXIT_OK


# ---- what-if ----------------------------------------------------------------------------------------------------


def _what_if(args: argparse.Namespace) -> int:
    if args.without is None and args.alpha is None:
        raise UserError("nothing is changed: name a peer with --without PEER, or another strength with --alpha A")
    from spes_client import replay_tables
    from spes_p2p.replay.what_if import what_if

    run = _run(args)
    with ui.progress() as report:
        actual, changed = what_if(
            run,
            args.round,
            without=args.without,
            alpha=args.alpha,
            allow_sources=args.allow_source or (),
            work=args.work,
            threads=args.threads,
            report=report,
        )
    if args.json:
        ui.print_json(
            {
                "round": args.round,
                "without": args.without,
                "alpha": args.alpha,
                "actual": dataclasses.asdict(actual),
                "changed": dataclasses.asdict(changed),
                "difference_bits_per_byte": changed.bits_per_byte - actual.bits_per_byte,
            }
        )
    else:
        ui.print_rich(replay_tables.comparison(actual, changed))
    return ui.EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
