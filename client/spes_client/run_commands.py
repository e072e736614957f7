"""`spes run`: write a manifest, sign it, show it, and sign the organizer's orders for a run.

The way of a run: `new` writes TOML, `digest` describes data files for it, `sign` turns it into the signed manifest,
volunteers join, `start` signs the first owner table. `reset`, `ban` and `end` are for later.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import re
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_client import ui
from spes_client.digests import FORMATS
from spes_protocols.errors import IntegrityError, RemoteError, UserError
from spes_protocols.types import ENVELOPE_BYTES_MAX, GROUPS_MAX, PEER_ID

if TYPE_CHECKING:
    from spes_protocols.manifest import Data, Manifest, Shard, Tokenizer
    from spes_protocols.messages import Signed


def register(subparsers: Any) -> None:
    """Add `run` and its verbs."""
    run = subparsers.add_parser(
        "run", help="describe, sign, show and steer a run", description=__doc__, epilog=ui.EXIT_CODES
    )
    run.set_defaults(handler=lambda args: run.error("no verb given"))
    verbs = run.add_subparsers(metavar="VERB")
    _register_new(verbs)
    _register_digest(verbs)
    _register_sign(verbs)
    _register_show(verbs)
    _register_orders(verbs)


def _register_new(verbs: Any) -> None:
    new = verbs.add_parser("new", help="write a manifest to edit")
    ui.flag(
        new,
        "--preset",
        metavar="NAME",
        required=True,
        help="tiny (the demo's model), 1b, 2b, 7b or 9b (models of the SPES paper)",
    )
    ui.flag(new, "--name", default="", help="name that volunteers see (default: the preset's)")
    ui.flag(
        new, "--seed", type=ui.whole_number(0, 2**63 - 1), help="fixes first weights and data order (default: drawn)"
    )
    ui.flag(
        new,
        "--nodes",
        type=ui.whole_number(1, GROUPS_MAX),
        metavar="N",
        help="for N nodes: a group for each, the published batch divided among them (default: the preset's own)",
    )
    ui.flag(
        new,
        "--tokens",
        type=_tokens,
        metavar="T",
        help="length of the run in tokens, such as 100e9 (default: the preset's)",
    )
    ui.flag(
        new,
        "--upcycle",
        metavar="DIR",
        default="",
        help="a dense Qwen3 checkpoint whose MLPs become the experts, with --preset 9b; writes the first state too",
    )
    ui.flag(
        new,
        "--upcycle-noise",
        type=ui.number(0.0, 1.0),
        metavar="SHARE",
        default=0.0,
        help="share of each expert's weights that gets noise, 0 to 1 (default 0: the model is what it was)",
    )
    ui.flag(
        new,
        "--data",
        type=ui.one_of("sotu"),
        help="prepare this corpus too: sotu, presidential messages, with --preset tiny",
    )
    ui.flag(
        new, "--data-dir", metavar="DIR", default="", help="where --data puts its files (default: beside the manifest)"
    )
    ui.flag(
        new, "-o", "--output", metavar="FILE", env=None, default="run.toml", help="file to write (default run.toml)"
    )
    ui.flag(new, "--force", action="store_true", env=None, help="overwrite the file")
    ui.json_flag(new)
    new.set_defaults(handler=_new)


def _register_digest(verbs: Any) -> None:
    digest = verbs.add_parser("digest", help="print the manifest's tables for data files: digest, size, tokens")
    digest.add_argument("files", nargs="*", metavar="FILE_OR_URL", help="files of one source")
    ui.flag(digest, "--tokenizer", metavar="FILE_OR_URL", default="", help="tokenizer for text; prints its table too")
    ui.flag(
        digest, "--eos-token", metavar="TEXT", default="", help="token that closes a document (default: the usual ones)"
    )
    ui.flag(digest, "--format", type=ui.one_of(*FORMATS), help="npy, txt, jsonl, parquet (default: the ending)")
    ui.flag(digest, "--text-key", metavar="KEY", default="text", help="key or column of the text (default text)")
    ui.flag(digest, "--heldout", action="store_true", help="the files are the held-out text")
    ui.json_flag(digest)
    digest.set_defaults(handler=_digest)


def _register_sign(verbs: Any) -> None:
    sign = verbs.add_parser("sign", help="check a manifest and sign it")
    sign.add_argument("manifest", type=Path, metavar="TOML", help="file that `spes run new` wrote")
    _key_flags(sign)
    ui.flag(
        sign, "-o", "--output", metavar="FILE", env=None, default="", help="signed file (default: the name with .spes)"
    )
    ui.flag(
        sign,
        "--genesis",
        metavar="FILE",
        default="",
        help='first state of a run with genesis = "snapshot" (default: the manifest\'s name with .genesis.safetensors)',
    )
    ui.flag(sign, "--check-data", action="store_true", help="read all data files and compare their digests first")
    ui.flag(sign, "--force", action="store_true", env=None, help="overwrite another signed run")
    ui.json_flag(sign)
    sign.set_defaults(handler=_sign)


def _register_show(verbs: Any) -> None:
    show = verbs.add_parser("show", help="show a signed manifest, its signature checked")
    show.add_argument("run", nargs="?", type=Path, metavar="FILE_OR_RUN_DIR", help="default: the run in --dir")
    ui.dir_flag(show)
    ui.json_flag(show)
    show.set_defaults(handler=_show)


def _register_orders(verbs: Any) -> None:
    for verb, what in (
        ("start", "sign the first owner table from the claims that peers made, which starts the run"),
        ("reset", "go on from a commit with a new owner table"),
        ("ban", "remove a peer from the run and refuse its claims"),
        ("end", "end the run"),
    ):
        parser = verbs.add_parser(verb, help=what, description=f"{what[0].upper()}{what[1:]}.", epilog=ui.EXIT_CODES)
        parser.add_argument("run", type=Path, metavar="RUN", help="the signed manifest (.spes) or a run directory")
        if verb == "ban":
            parser.add_argument("banned", type=_peer_id, metavar="PEER_ID", help="who is banned")
        if verb == "reset":
            ui.flag(
                parser,
                "--commit",
                type=_digest_hex,
                env=None,
                metavar="HEX",
                help="commit to go on from (default: the last one)",
            )
        if verb != "start":
            ui.flag(parser, "--reason", default="", env=None, metavar="TEXT", help="why; everybody can read it")
        ui.flag(
            parser, "--peer", action="append", required=True, metavar="ADDR", help="a peer of the run; may be repeated"
        )
        _key_flags(parser)
        ui.json_flag(parser)
        parser.set_defaults(handler=_order, verb=verb)


def _key_flags(parser: argparse.ArgumentParser) -> None:
    ui.flag(parser, "--key", metavar="FILE", default="", help="the organizer's key (default: the identity in --dir)")
    ui.dir_flag(parser)


def _peer_id(text: str) -> str:
    problem = PEER_ID.problem(text)
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {problem}")
    return text


def _tokens(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 1 <= value <= 1e15:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of tokens from 1 to 1e15, such as 100e9")
    return int(value)


def _digest_hex(text: str) -> bytes:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a commit's digest, 64 hexadecimal digits")
    return bytes.fromhex(text)


def _new(args: argparse.Namespace) -> int:
    from spes_client.manifest_toml import check_name, render
    from spes_client.presets import FILL_IN, UPCYCLED, new_manifest

    output = Path(args.output)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    check_name(args.name or args.preset)
    draft = new_manifest(args.preset, nodes=args.nodes, tokens=args.tokens)
    if args.preset in UPCYCLED and not args.upcycle:
        raise UserError(f"preset {args.preset} begins from a dense Qwen3 checkpoint: give its directory with --upcycle")
    if args.upcycle and args.preset not in UPCYCLED:
        raise UserError(f"preset {args.preset} begins from its seed; --upcycle goes with --preset {UPCYCLED[0]}")
    if output.exists() and not args.force:
        raise UserError(f"{output} exists; choose another name with -o, or overwrite it with --force")
    ui.check_writable(output)
    data = _prepare_data(args, draft["model"]["vocab_size"], output) if args.data else None
    common: dict[str, Any] = {"name": args.name, "seed": seed, "data": data, "nodes": args.nodes, "tokens": args.tokens}
    genesis: Path | None = None
    if args.upcycle:
        from spes_client.upcycling import upcycle

        plain, genesis = upcycle(args, common, output)
    else:
        plain = new_manifest(args.preset, **common)
    ui.write_file(output, render(plain).encode())
    steps, rise = plain["optimizer"]["total_steps"], plain["optimizer"]["warmup_steps"]
    if steps <= rise:
        ui.warn(f"the run has {steps} steps, and the learning rate rises for {rise}: edit optimizer.warmup_steps")
    if args.json:
        written = {"file": output} if genesis is None else {"file": output, "genesis": genesis}
        ui.print_json({**written, "name": plain["name"], "seed": seed, "preset": args.preset})
        return ui.EXIT_OK
    if genesis is not None:
        print(f"wrote {genesis}, the first state, which bootstrap nodes serve")
    todo = "" if args.data else f'replace each "{FILL_IN}" (spes run digest helps with the data), then '
    print(f"wrote {output}; {todo}sign it: spes run sign {output} --key YOUR_KEY")
    return ui.EXIT_OK


def _prepare_data(args: argparse.Namespace, vocab_size: int, output: Path) -> Data:
    """The corpus that --data names, its files written beside the manifest or in --data-dir."""
    from spes_p2p.data.corpus import prepare_sotu

    if args.preset != "tiny":
        raise UserError(f"--data {args.data} is too small for --preset {args.preset}; use it with --preset tiny")
    folder = Path(args.data_dir).expanduser() if args.data_dir else output.absolute().parent / args.data
    with ui.progress() as report:
        return prepare_sotu(folder, vocab_size, report=report)


def _digest(args: argparse.Namespace) -> int:
    from spes_client.digests import describe_shard, describe_tokenizer
    from spes_client.manifest_toml import render_table

    if not args.files and not args.tokenizer:
        raise UserError("nothing to describe; name data files, or a tokenizer with --tokenizer FILE_OR_URL")
    tables: list[tuple[str, dict[str, Any]]] = []
    tokenizer, text_bytes = None, 0
    with tempfile.TemporaryDirectory() as folder, ui.progress() as report:
        if args.tokenizer:
            block, tokenizer = describe_tokenizer(args.tokenizer, args.eos_token, Path(folder), report)
            tables.append(("[data.tokenizer]", block))
        for url in args.files:
            block, size = describe_shard(url, args.format, args.text_key, tokenizer, Path(folder), report)
            text_bytes += size
            tables.append(("[[data.heldout.shards]]" if args.heldout else "[[data.sources.shards]]", block))
    if args.json:
        ui.print_json([{"table": table.strip("[]"), **block} for table, block in tables])
        return ui.EXIT_OK
    if args.heldout and text_bytes:
        print(f"# in [data]:\nheldout_bytes = {text_bytes}\n")
    print("\n\n".join(render_table(header, block) for header, block in tables))
    return ui.EXIT_OK


def _sign(args: argparse.Namespace) -> int:
    from spes_client.manifest_toml import read, to_manifest
    from spes_client.run_summary import identity_rows, run_json, size_rows
    from spes_p2p.crypto.envelope import seal

    plain = read(args.manifest)
    identity = ui.load_identity(args)
    try:
        manifest = to_manifest(plain, identity.peer_id)
    except UserError as error:
        raise UserError(f"{args.manifest}: {error}") from None
    if manifest.organizer.keys[0] != identity.peer_id:
        raise UserError(
            f"{args.manifest}: organizer.keys[0] is {manifest.organizer.keys[0]}, but {ui.key_path(args)} holds "
            f"{identity.peer_id}; give that organizer's --key, or remove organizer.keys to sign with this one"
        )
    output = Path(args.output) if args.output else args.manifest.with_suffix(".spes")
    ui.check_writable(output)
    checked = _check_data(manifest) if args.check_data else 0
    signed = seal(_with_genesis_root(manifest, args), identity)
    if output.exists() and not args.force and output.read_bytes() != signed.raw:
        raise UserError(
            f"{output} exists and is not this run; choose another name with -o, or overwrite it with --force"
        )
    ui.write_file(output, signed.raw)
    if args.json:
        ui.print_json({"file": output, **run_json(signed)})
    else:
        data = [("data", f"{checked} files read, each as the manifest says")] if checked else []
        ui.print_rich(
            ui.pairs_table([("wrote", str(output)), *identity_rows(signed), *size_rows(signed.record), *data])
        )
    return ui.EXIT_OK


def _with_genesis_root(manifest: Manifest, args: argparse.Namespace) -> Manifest:
    """The manifest with the root of S_0; one that the file states must be right. Raises `UserError`."""
    from spes_p2p.delta.genesis import genesis_root

    what = "this model and seed"
    if manifest.genesis == "seed" and args.genesis:
        raise UserError(
            'this run\'s first state follows from its seed: leave out --genesis, or set genesis = "snapshot"'
        )
    with ui.progress() as report:
        if manifest.genesis == "snapshot":
            what = str(_genesis_path(args))
            root = _root_of_file(manifest, _genesis_path(args), report)
        else:
            report("computing the first weights", -1.0)
            root = genesis_root(manifest.model, manifest.ownership.groups, manifest.seed)
    if manifest.genesis_root not in (b"", root):
        raise UserError(f"{args.manifest}: genesis_root is not the root of {what}, {root.hex()}; remove the key")
    return dataclasses.replace(manifest, genesis_root=root)


def _genesis_path(args: argparse.Namespace) -> Path:
    from spes_p2p.store.first_state import beside

    return Path(args.genesis) if args.genesis else beside(args.manifest)


def _root_of_file(manifest: Manifest, path: Path, report: Callable[[str, float], None]) -> bytes:
    from spes_p2p.core.roots import state_root
    from spes_p2p.core.tensors import tensor_specs
    from spes_p2p.store.first_state import state_index

    specs = [(spec.name, spec.shape) for spec in tensor_specs(manifest.model, manifest.ownership.groups)]
    return state_root(state_index(path, specs, lambda share: report(f"reading {path}", share)))


def _check_data(manifest: Manifest) -> int:
    """Read every data file, and count them; raises `IntegrityError` for the first whose digest or size differs."""
    from spes_client.digests import digest_of

    data = manifest.data
    files: list[Shard | Tokenizer] = [data.tokenizer]
    files += [shard for source in (*data.sources, data.heldout) for shard in source.shards]
    with ui.progress() as report:
        for file in files:
            sha256, size = digest_of(file.url, report)
            if (sha256, size) != (file.sha256, file.bytes):
                raise IntegrityError(
                    "blob_digest",
                    file.url,
                    f"{size} bytes with digest {sha256}, but the manifest says {file.bytes} bytes and {file.sha256}; "
                    f"print its table anew with: spes run digest {file.url}",
                )
    return len(files)


def _show(args: argparse.Namespace) -> int:
    from spes_client.run_summary import identity_rows, run_json, setting_rows, size_rows
    from spes_p2p.store.rundir import resolve_run_dir

    signed = read_signed(args.run) if args.run else resolve_run_dir(ui.home(args)).manifest
    if args.json:
        ui.print_json(run_json(signed))
        return ui.EXIT_OK
    rows = [*identity_rows(signed), *size_rows(signed.record), ("", ""), *setting_rows(signed.record)]
    ui.print_rich(ui.pairs_table(rows))
    return ui.EXIT_OK


def read_signed(path: Path) -> Signed[Manifest]:
    """The signed manifest in a file or run directory. Raises `UserError`, or `IntegrityError` if it does not verify."""
    from spes_p2p.crypto.envelope import unseal_manifest
    from spes_p2p.store.rundir import resolve_run_dir

    if path.is_dir():
        return resolve_run_dir(path).manifest
    try:
        with path.open("rb") as file:
            data = file.read(ENVELOPE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise UserError(f"no signed manifest at {path}; make one with: spes run sign run.toml -o {path}") from None
    try:
        return unseal_manifest(data)
    except RemoteError as error:
        if path.suffix == ".toml":
            raise UserError(f"{path} is not signed; sign it with: spes run sign {path} --key YOUR_KEY") from None
        raise IntegrityError(error.check, str(path), error.detail) from None


def _order(args: argparse.Namespace) -> int:
    signed = read_signed(args.run)
    identity = ui.load_identity(args)
    from spes_p2p.peer import organizer  # after the checks: it brings the network with it

    if args.verb == "start":
        order = organizer.run_start(signed.raw, identity, args.peer)
    elif args.verb == "reset":
        order = organizer.run_reset(signed.raw, identity, args.peer, commit=args.commit, reason=args.reason)
    elif args.verb == "ban":
        order = organizer.run_ban(signed.raw, identity, args.peer, peer=args.banned, reason=args.reason)
    else:
        order = organizer.run_end(signed.raw, identity, args.peer, reason=args.reason)
    message = asyncio.run(order)
    if args.json:
        ui.print_json({"message": message})
    else:
        print(ui.one_line(message))
    return ui.EXIT_OK
