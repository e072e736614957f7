"""The manifest as a file that people edit: commented TOML out, checked records in, and the reference of all keys.

Types, ranges and defaults come from the dataclasses of `spes_protocols.manifest`; only the meanings are written here.
`python -m spes_client.manifest_toml` prints `docs/manifest.md`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_client.presets import FILL_IN
from spes_protocols.codec import Matches, OneOf, Range, Size, SizeOneOf, from_plain, to_plain
from spes_protocols.errors import SchemaError, UserError
from spes_protocols.manifest import Manifest

TOML_BYTES_MAX = 64 * 1024 * 1024
"""A larger file is not a manifest."""

_COMMENT_COLUMN = 34
_LINE_MAX = 120

MEANINGS: dict[str, dict[str, str]] = {
    "Manifest": {
        "version": "version of this format",
        "name": "name that volunteers see",
        "description": "what the run is for, in a sentence or two",
        "seed": "fixes the first weights and the order of the data",
        "model": "Architecture, named as in transformers' configurations of OLMoE and Qwen3-MoE.",
        "ownership": "Expert groups: what a peer owns, the same experts in every layer.",
        "optimizer": "AdamW, with a cosine schedule over schedule steps (the local steps of one peer).",
        "loss": "Coefficients of the auxiliary losses.",
        "routing": "Where tokens go while a peer trains. It changes neither the model nor what an export computes.",
        "rounds": "Rules of a round.",
        "merging": "Expert-merging warm-up.",
        "codecs": "How the differences that peers send are coded.",
        "data": "What the run trains on, and the text that measures it.",
        "admission": "Who may claim expert groups.",
        "organizer": "The keys that speak for the run.",
        "genesis": "where the first weights come from: the seed, or a state file (`spes run new --upcycle`)",
        "genesis_root": "state root of the first weights; `spes run sign` computes it",
    },
    "Model": {
        "vocab_size": "rows of the embedding and of the output layer",
        "hidden_size": "width; an even multiple of num_attention_heads",
        "intermediate_size": "hidden width of one expert",
        "num_hidden_layers": "layers",
        "num_attention_heads": "attention heads",
        "num_experts": "experts in each layer",
        "num_experts_per_tok": "experts that each token is sent to, at most num_experts",
        "sequence_length": "tokens in a training sequence",
        "rope_theta": "base of the rotary position embedding",
        "rms_norm_eps": "epsilon of RMSNorm",
        "initializer_range": "standard deviation of the first weights",
        "num_key_value_heads": "heads of keys and values, a divisor of num_attention_heads; 0: as many",
        "head_dim": "width of a head, even, only with qk_norm = head; 0: hidden_size / num_attention_heads",
        "qk_norm": "queries and keys are normalised over the whole width (OLMoE) or in each head (Qwen3)",
        "norm_topk_prob": "the chosen experts' weights are scaled to a sum of 1 (Qwen3)",
    },
    "Ownership": {
        "groups": "expert groups; a divisor of model.num_experts",
        "min_peers": "peers that a run starts with; at most groups, so that each owns one",
        "groups_per_peer_max": "groups one peer may own; 0: groups / min_peers, rounded up",
    },
    "Optimizer": {
        "lr": "learning rate at its peak",
        "lr_min_ratio": "the last learning rate as a share of the peak",
        "warmup_steps": "schedule steps of linear warm-up",
        "total_steps": "schedule steps until the learning rate reaches its minimum",
        "beta1": "decay of the first moment",
        "beta2": "decay of the second moment",
        "eps": "epsilon of AdamW",
        "weight_decay": "decoupled weight decay, on what a peer trains",
        "grad_clip": "largest norm of a step's gradient",
    },
    "Loss": {
        "load_balance": "load-balancing loss of the router",
        "router_z": "z-loss of the router's logits",
        "softmax_z": "z-loss of the output logits",
    },
    "Routing": {
        "owned_bias": "added to the router's logits of the experts a peer owns while it trains; falls linearly to 0",
        "owned_bias_until_step": "schedule step at which owned_bias has reached 0",
    },
    "Rounds": {
        "phases": "How long rounds are, from which schedule step on. The first begins at 0, the others ascend.",
        "lag": "rounds that training may run ahead of the agreement",
        "lag_from_step": "schedule step from which on it may; the early, steep part of a run loses by it",
        "grace_seconds": "how long to wait for more contributions once 2/3 of the groups are there",
        "blob_seconds": "how long a contribution's files may take to arrive",
        "propose_seconds": "how long to wait for a leader's proposal before the next leader's turn",
        "vote_seconds": "how long to wait for votes before the next view",
        "view_growth": "factor by which these waits grow from view to view",
        "stall_seconds": "time without a commit after which owners of more than half of the groups may go on alone",
        "on_majority_loss": "when half of the groups or more are gone: pause, or continue with whoever is there",
        "lease_seconds": "time without a commit after which whoever is there continues",
        "lease_rounds": "rounds in a row that an owner may miss before its groups are vacant",
        "offences_max": "refused contributions after which a peer loses its groups",
        "standby_share": "share of the mean that peers without groups have together at most",
        "shared_quota": "shared sections that count in a round; with more contributors they are drawn by lot",
        "norm_limit": "a contribution is refused when its norm is this many times the median's",
    },
    "Phase": {
        "from_step": "schedule step from which this phase holds",
        "steps": "local steps in a round (H)",
        "batch_sequences": "sequences in a local step of one peer",
    },
    "Merging": {
        "alpha": "how far an expert moves towards the ones most similar to it; falls linearly to 0",
        "interval": "schedule steps between merges; 0: never",
        "until_step": "schedule step at which alpha has reached 0",
        "top": "how many similar experts count; less than model.num_experts",
    },
    "Codecs": {
        "shared": "codec of the shared parameters, with error feedback",
        "group": "codec of an owned group, whose owner keeps the exact weights",
    },
    "Data": {
        "heldout_bytes": "size of the held-out text in UTF-8, for bits per byte",
        "sources": "Sources of training text, mixed by weight. Names differ.",
        "heldout": "Text that nobody trains on.",
        "tokenizer": "The tokenizer, a JSON file of the `tokenizers` library.",
    },
    "Source": {
        "name": "name of the source",
        "format": "npy: uint16 or uint32 tokens; txt, jsonl, parquet: text for the tokenizer",
        "weight": "how much of this source against the others",
        "text_key": "the key (jsonl) or column (parquet) that holds a document's text",
        "shards": "The files. `spes run digest` prints these tables for files and addresses.",
    },
    "Shard": {
        "url": "where the file is: https://, hf://, s3://, or a path",
        "sha256": "digest of the file",
        "bytes": "size of the file",
        "tokens": "tokens it holds, for text after the tokenizer",
    },
    "Tokenizer": {
        "url": "where the file is",
        "sha256": "digest of the file",
        "bytes": "size of the file",
        "eos_id": "token that closes each document; less than model.vocab_size",
    },
    "Admission": {
        "mode": "open: anyone; allowlist: only the peers listed",
        "peers": "peer ids that may claim, with allowlist",
    },
    "Organizer": {
        "keys": "peer ids of the organizer; the first signs the manifest (`spes run sign` fills it in)",
        "start_keys": "peer ids that may start the run and nothing else, such as a bootstrap's",
    },
}
"""What each key means, by record and field. A capital letter and a full stop: a sentence over a table."""


@dataclass(frozen=True)
class Key:
    """One key of the manifest as the reference shows it; `path` marks lists of tables with `[]`."""

    path: str
    kind: str
    allowed: str
    default: str
    meaning: str


def keys(cls: type = Manifest, prefix: str = "") -> Iterator[Key]:
    """Every key of the manifest that holds a value, in the order of the file."""
    for field, hint in _fields(cls):
        path = prefix + field.name
        record, many = _record_of(hint)
        if record is not None:
            yield from keys(record, f"{path}{'[]' if many else ''}.")
            continue
        yield Key(path, _kind(hint), _allowed(hint), _default_text(field), MEANINGS[cls.__name__][field.name])


def _fields(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """The fields of a record with their types: first values, then tables, as TOML wants them."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [(field, hints[field.name]) for field in dataclasses.fields(cls)]
    yield from (pair for pair in fields if _record_of(pair[1])[0] is None)
    yield from (pair for pair in fields if _record_of(pair[1])[0] is not None)


def _record_of(hint: Any) -> tuple[Any, bool]:
    """(record, whether a list of it) of a type that is a table in TOML, else (None, False)."""
    inner = _bare(hint)
    if typing.get_origin(inner) is tuple:
        item = _bare(typing.get_args(inner)[0])
        return (item, True) if _is_record(item) else (None, False)
    return (inner, False) if _is_record(inner) else (None, False)


def _is_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _kind(hint: Any) -> str:
    inner = _bare(hint)
    if typing.get_origin(inner) is tuple:
        return f"list of {_kind(typing.get_args(inner)[0])}"
    return {bool: "boolean", int: "integer", float: "number", str: "text", bytes: "digest"}[inner]


def _allowed(hint: Any) -> str:
    """The constraints of a type in words; for a list also those of its items."""
    inner = _bare(hint)
    if inner is bool:
        return "true or false"
    parts = [_constraint(c, inner) for c in typing.get_args(hint)[1:]] if inner is not hint else []
    if typing.get_origin(inner) is tuple:
        parts.append("each " + _allowed(typing.get_args(inner)[0]))
    return ", ".join(parts)


def _constraint(constraint: Any, inner: Any) -> str:
    if isinstance(constraint, Range):
        return _interval(constraint.low, constraint.high)
    if isinstance(constraint, Size):
        unit = "entries" if typing.get_origin(inner) is tuple else "bytes" if inner is bytes else "characters"
        return f"{_interval(constraint.low, constraint.high)} {unit}"
    if isinstance(constraint, SizeOneOf):
        return " or ".join(map(str, constraint.sizes)) + " bytes"
    if isinstance(constraint, OneOf):
        return "one of " + ", ".join(constraint.values)
    assert isinstance(constraint, Matches)
    return constraint.what


def _interval(low: float, high: float) -> str:
    return _bound(low) if low == high else f"{_bound(low)} to {_bound(high)}"


def _bound(value: int | float) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    for exponent in (40, 53, 63):
        if value in (2**exponent, 2**exponent - 1):
            return f"2^{exponent}" if value == 2**exponent else f"2^{exponent} - 1"
    return str(value)


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    return _value(to_plain(field.default)) if field.default != b"" else "computed"


def _value(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, except for DEL, which TOML wants escaped as well.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return repr(value)


def render(plain: dict[str, Any]) -> str:
    """A manifest from nested dicts as commented TOML: defaults spelled out, what is missing left as a comment."""
    lines = [
        "# A SPES run. Edit, then sign it with: spes run sign THIS_FILE --key YOUR_KEY",
        "# All keys are explained in docs/manifest.md; the range a value may have stands behind it.",
        "",
    ]
    _render_table(Manifest, plain, "", lines, comments=True)
    return "\n".join(lines) + "\n"


def render_table(header: str, plain: dict[str, Any]) -> str:
    """One table of values as TOML without comments."""
    return "\n".join([header, *(f"{key} = {_value(value)}" for key, value in plain.items())])


def _render_table(cls: type, plain: dict[str, Any], prefix: str, lines: list[str], *, comments: bool) -> None:
    for field, hint in _fields(cls):
        path = prefix + field.name
        meaning = MEANINGS[cls.__name__][field.name]
        record, many = _record_of(hint)
        if record is None:
            lines.extend(_render_value(field, hint, plain, meaning, comments))
            continue
        tables = plain.get(field.name, [] if many else {})
        for number, table in enumerate(tables if many else [tables]):
            first = comments and number == 0
            lines.append("")
            if first:
                lines.append(f"# {meaning}")
            lines.append(f"[[{path}]]" if many else f"[{path}]")
            _render_table(record, table, f"{path}.", lines, comments=first)


def _render_value(
    field: dataclasses.Field[Any], hint: Any, plain: dict[str, Any], meaning: str, comments: bool
) -> list[str]:
    comment = f"# {meaning} ({_allowed(hint)})" if comments else ""
    if field.name in plain:
        assignment = f"{field.name} = {_value(plain[field.name])}"
    elif field.default is dataclasses.MISSING:
        assignment = f"# {field.name} ="
    elif field.default == b"":
        return []
    else:
        assignment = f"{field.name} = {_value(to_plain(field.default))}"
    line = f"{assignment:{_COMMENT_COLUMN}}{comment}".rstrip()
    if comment and (len(assignment) >= _COMMENT_COLUMN or len(line) > _LINE_MAX):
        return [comment, assignment]
    return [line]


def read(path: Path) -> dict[str, Any]:
    """The nested dicts of a TOML file. Raises `UserError` when it cannot be read or is no TOML."""
    try:
        with path.open("rb") as file:
            data = file.read(TOML_BYTES_MAX + 1)  # a device has no size, and no end
        if len(data) > TOML_BYTES_MAX:
            raise UserError(f"{path} is larger than any manifest; give the TOML file that `spes run new` wrote")
        return tomllib.loads(data.decode())
    except FileNotFoundError:
        raise UserError(f"no file {path}; write one with: spes run new --preset tiny -o {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None


def check_name(name: str) -> None:
    """Raise `SchemaError` for a run's name that the manifest does not allow."""
    (constraint,) = typing.get_type_hints(Manifest, include_extras=True)["name"].__metadata__
    problem = constraint.problem(name)
    if problem:
        raise SchemaError("name", name, problem)


def to_manifest(plain: dict[str, Any], organizer: str = "") -> Manifest:
    """Check a manifest; `organizer` is the peer id to fill in where `organizer.keys` is missing.

    Raises `SchemaError` naming key, value and allowed range, `UserError` for what is still marked `FILL_IN`. The
    record's `genesis_root` is what the file says, or empty.
    """
    open_keys = [path for path, value in _leaves(plain) if isinstance(value, str) and value.startswith(FILL_IN)]
    if open_keys:
        more = f" ({len(open_keys) - 1} more are marked {FILL_IN})" if len(open_keys) > 1 else ""
        raise UserError(f"{open_keys[0]} is yet to be filled in: {_todo(open_keys[0])}{more}")
    filled = dict(plain)
    if organizer and isinstance(filled.get("organizer", {}), dict):
        filled["organizer"] = {"keys": [organizer]} | filled.get("organizer", {})
    if isinstance(filled.get("genesis_root"), str):
        try:
            filled["genesis_root"] = bytes.fromhex(filled["genesis_root"])
        except ValueError:
            raise SchemaError("genesis_root", filled["genesis_root"], "a digest of 64 hexadecimal digits") from None
    manifest = from_plain(Manifest, filled)
    _check_data(manifest)
    return manifest


def _leaves(plain: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(plain, dict):
        for key, value in plain.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(plain, list):
        for i, value in enumerate(plain):
            yield from _leaves(value, f"{path}[{i}]")
    else:
        yield path, plain


def _todo(path: str) -> str:
    """What the organizer has to do about a key that is still to be filled in."""
    if ".shards[" in path:
        return "print its table with: spes run digest FILE_OR_URL --tokenizer TOKENIZER_JSON"
    if path.startswith("data.tokenizer"):
        return "print its table with: spes run digest --tokenizer TOKENIZER_JSON"
    plain_path = re.sub(r"\[\d+\]", "[]", path)
    return next((f"{key.meaning} ({key.allowed})" for key in keys() if key.path == plain_path), "a value")


def _check_data(manifest: Manifest) -> None:
    """What the schema of one key cannot say: each source holds a sequence, the end token is in the vocabulary."""
    needed = manifest.model.sequence_length + 1
    for i, source in enumerate(manifest.data.sources):
        if source.tokens < needed:
            raise SchemaError(f"data.sources[{i}].shards", source.tokens, f"at least {needed} tokens, one sequence")
    if manifest.data.tokenizer.eos_id >= manifest.model.vocab_size:
        allowed = f"less than model.vocab_size = {manifest.model.vocab_size}"
        raise SchemaError("data.tokenizer.eos_id", manifest.data.tokenizer.eos_id, allowed)


def reference() -> str:
    """`docs/manifest.md`: every key with its type, range, default and meaning."""
    lines = [
        "# The run manifest",
        "",
        "A run is one TOML file. `spes run new` writes it, the organizer edits it, `spes run sign` turns it into the",
        "signed manifest that every peer holds. Its digest is the run id: to change anything is to begin another run.",
        "",
        "A value out of range, an unknown key or a missing one is refused with its name, the value and what is",
        f'allowed. `spes run new` writes `"{FILL_IN}"` where only the organizer can know, and `spes run sign` says so.',
        "",
        "This page is generated: `python -m spes_client.manifest_toml > docs/manifest.md`.",
    ]
    for title, cls, path in _tables(Manifest, "", "Top level"):
        lines += ["", f"## {title}", ""]
        if path:
            lines += [path, ""]
        lines += ["| key | type | allowed | default | meaning |", "|---|---|---|---|---|"]
        for field, hint in _fields(cls):
            if _record_of(hint)[0] is not None:
                continue
            meaning = MEANINGS[cls.__name__][field.name]
            default = _default_text(field)
            shown = default if default in ("required", "computed") else f"`{default}`"
            lines.append(f"| `{field.name}` | {_kind(hint)} | {_allowed(hint)} | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


def _tables(cls: type, prefix: str, title: str, about: str = "") -> Iterator[tuple[str, type, str]]:
    """(title, record, sentence) of each table, depth first."""
    yield title, cls, about
    for field, hint in _fields(cls):
        record, many = _record_of(hint)
        if record is not None:
            path = prefix + field.name
            header = f"`[[{path}]]`" if many else f"`[{path}]`"
            yield from _tables(record, f"{path}.", header, MEANINGS[cls.__name__][field.name])


if __name__ == "__main__":
    print(reference(), end="")
