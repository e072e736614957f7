"""`spes run new|digest|sign|show`: the way of a manifest, and every way it can be wrong."""

import dataclasses
import functools
import http.server
import json
import os
import re
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from spes_client.manifest_toml import MEANINGS, keys, reference, render, to_manifest
from spes_client.presets import FILL_IN, new_manifest
from spes_client.run_summary import Sizes, size_rows
from spes_client.subject import of_manifest
from spes_client.ui import bytes_text
from spes_p2p.core.plan import traffic
from spes_p2p.crypto.envelope import seal, unseal_manifest
from spes_p2p.crypto.keys import Identity
from spes_p2p.delta.genesis import genesis_root
from spes_p2p.store.rundir import RunDir
from spes_protocols import manifest as manifest_module
from spes_protocols.codec import digest, to_plain
from tests.unit.cli_support import Spes, complete, write_toml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return Spes(capsys)


@pytest.fixture
def organizer(tmp_path: Path) -> Identity:
    identity = Identity.from_seed(bytes(32))
    identity.save(tmp_path / "organizer.key")
    return identity


def test_toml_sign_show_give_the_same_record(spes: Spes, tmp_path: Path, organizer: Identity) -> None:
    plain = complete(tmp_path)
    toml = write_toml(tmp_path, plain)
    signed = spes("run", "sign", toml, "--key", "organizer.key", "--json").json
    shown = spes("run", "show", "run.spes", "--json").json
    assert signed.pop("file") == str(tmp_path / "run.spes")
    assert shown == signed
    assert shown["manifest"]["organizer"]["keys"] == [organizer.peer_id] == [shown["organizer"]]

    record = unseal_manifest((tmp_path / "run.spes").read_bytes()).record
    expected = to_manifest(plain, organizer.peer_id)
    root = genesis_root(expected.model, 4, 7)
    assert to_plain(record) == to_plain(expected) | {"genesis_root": root}
    assert shown["run_id"] == digest(record).hex()
    assert shown["manifest"]["genesis_root"] == root.hex()


def test_show_lists_every_setting_for_people(spes: Spes, tmp_path: Path, organizer: Identity) -> None:
    write_toml(tmp_path, complete(tmp_path))
    assert spes("run", "sign", "run.toml", "--key", "organizer.key").code == 0
    out = spes("run", "show", "run.spes").out
    assert organizer.peer_id in out
    for key in keys():
        if not key.path.startswith(("data.sources", "data.heldout.")):  # a source is one row
            assert re.search(rf"^{re.escape(key.path.replace('[]', '[0]'))} ", out, re.MULTILINE), key.path
    assert "train: npy, 1 file" in out


def test_a_run_directory_is_shown_like_its_manifest(spes: Spes, tmp_path: Path, organizer: Identity) -> None:
    write_toml(tmp_path, complete(tmp_path))
    spes("run", "sign", "run.toml", "--key", "organizer.key")
    run_dir = RunDir.create(tmp_path / "home", (tmp_path / "run.spes").read_bytes())
    from_file = spes("run", "show", "run.spes", "--json").json
    assert spes("run", "show", run_dir.path, "--json").json == from_file
    assert spes("run", "show", "--json").json == from_file


def test_signing_again_changes_nothing_and_another_run_is_not_overwritten(
    spes: Spes, tmp_path: Path, organizer: Identity
) -> None:
    plain = complete(tmp_path)
    write_toml(tmp_path, plain)
    assert spes("run", "sign", "run.toml", "--key", "organizer.key").code == 0
    before = (tmp_path / "run.spes").read_bytes()
    assert spes("run", "sign", "run.toml", "--key", "organizer.key").code == 0
    write_toml(tmp_path, plain | {"seed": 8})
    result = spes("run", "sign", "run.toml", "--key", "organizer.key")
    assert result.code == 2
    assert "run.spes exists" in result.error
    assert (tmp_path / "run.spes").read_bytes() == before
    assert spes("run", "sign", "run.toml", "--key", "organizer.key", "--force").code == 0
    assert (tmp_path / "run.spes").read_bytes() != before


WRONG: list[tuple[str, Any, str]] = [
    ("model.hidden_size", 7, "model.hidden_size = 7: expected a number from 8 to 65536"),
    ("model.hidden_size", "wide", "model.hidden_size = 'wide': expected a whole number"),
    ("model.num_key_value_heads", 3, "model.num_key_value_heads = 3: expected a divisor of num_attention_heads = 4"),
    ("model.head_dim", 8, 'model.head_dim = 8: expected qk_norm = "head" beside it'),
    ("model.norm_topk_prob", 1, "model.norm_topk_prob = 1: expected true or false"),
    ("model.num_attention_heads", 5, "model.hidden_size = 16: expected an even multiple of num_attention_heads = 5"),
    ("optimizer.lr", 2.0, "optimizer.lr = 2.0: expected a number from 1e-08 to 1.0"),
    ("codecs.group", "zip", "codecs.group = 'zip': expected one of fp32, bf16, int8, int4"),
    ("ownership.groups", 3, "ownership.min_peers = 4: expected at most groups = 3"),
    ("rounds.phases", [], "rounds.phases = []: expected a length from 1 to 16"),
    ("rounds.lag", 2, "rounds.lag = 2: expected a number from 0 to 1"),
    ("name", "a/b", "name = 'a/b': expected a name of letters"),
    ("nonsense", 1, "nonsense = 1: expected no such key here; known keys: admission"),
    ("data.tokenizer.eos_id", 64, "data.tokenizer.eos_id = 64: expected less than model.vocab_size = 64"),
    ("data.sources[0].shards[0].tokens", 128, "data.sources[0].shards = 128: expected at least 129 tokens"),
    ("data.sources[0].shards[0].sha256", "ff", "data.sources[0].shards[0].sha256 = 'ff': expected a SHA-256 digest"),
    ("organizer.keys", ["12D3KooWshort"], "organizer.keys[0] = '12D3KooWshort': expected a peer id"),
    ("organizer", 5, "organizer = 5: expected a table"),
    ("genesis_root", "xyz", "genesis_root = 'xyz': expected a digest"),
    ("genesis_root", "00" * 32, "genesis_root is not the root of this model and seed"),
    ("optimizer.total_steps", FILL_IN, "optimizer.total_steps is yet to be filled in"),
    ("data.heldout.shards[0].sha256", FILL_IN, "print its table with: spes run digest"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=[f"{path}={value}" for path, value, _ in WRONG])
def test_a_wrong_value_is_named_with_its_range(
    spes: Spes, tmp_path: Path, organizer: Identity, path: str, value: Any, message: str
) -> None:
    plain = complete(tmp_path)
    _set(plain, path, value)
    (tmp_path / "run.toml").write_text(_toml(plain))
    result = spes("run", "sign", "run.toml", "--key", "organizer.key")
    assert result.code == 2
    assert result.error.startswith("run.toml: ")
    assert message in result.error
    assert not (tmp_path / "run.spes").exists()


@pytest.mark.parametrize(
    "path", [key.path for key in keys() if key.default == "required" and key.path != "organizer.keys"]
)
def test_a_missing_key_is_named(spes: Spes, tmp_path: Path, organizer: Identity, path: str) -> None:
    plain = complete(tmp_path)
    _remove(plain, path.replace("[]", "[0]"))
    (tmp_path / "run.toml").write_text(_toml(plain))
    result = spes("run", "sign", "run.toml", "--key", "organizer.key")
    assert result.code == 2
    assert f"{path.replace('[]', '[0]')} = None: expected a value; the key is missing" in result.error


def _toml(plain: dict[str, Any]) -> str:
    """Nested dicts as TOML, without any knowledge of the schema."""

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{key} = {value(v)}" for key, v in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(value(v) for v in item) + "]"
        return json.dumps(item)

    return "\n".join(f"{key} = {value(item)}" for key, item in plain.items())


def _walk(plain: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    *parents, last = path.replace("[0]", ".0").split(".")
    here: Any = plain
    for parent in parents:
        here = here[0] if parent == "0" else here.setdefault(parent, {})
    return here, last


def _set(plain: dict[str, Any], path: str, value: Any) -> None:
    table, key = _walk(plain, path)
    table[key] = value


def _remove(plain: dict[str, Any], path: str) -> None:
    table, key = _walk(plain, path)
    del table[key]


def test_files_that_are_no_manifest(spes: Spes, tmp_path: Path, organizer: Identity) -> None:
    (tmp_path / "garbage.toml").write_bytes(bytes(range(256)))
    (tmp_path / "broken.toml").write_text("name = \n")
    (tmp_path / "garbage.spes").write_bytes(os.urandom(500))
    (tmp_path / "empty.spes").write_bytes(b"")
    for name, words in (
        ("garbage.toml", "is not TOML"),
        ("broken.toml", "is not TOML"),
        ("missing.toml", "spes run new"),
    ):
        result = spes("run", "sign", name, "--key", "organizer.key")
        assert result.code == 2
        assert name in result.error and words in result.error
    for name in ("garbage.spes", "empty.spes"):
        result = spes("run", "show", name)
        assert result.code == 1
        assert f"decode failed for {name}" in result.error
    result = spes("run", "show", "missing.spes")
    assert result.code == 2
    assert "no signed manifest at missing.spes" in result.error
    assert "run.toml is not signed; sign it with: spes run sign run.toml" in _show_toml(spes, tmp_path)


def _show_toml(spes: Spes, tmp_path: Path) -> str:
    write_toml(tmp_path, complete(tmp_path))
    result = spes("run", "show", "run.toml")
    assert result.code == 2
    return result.error


def test_every_flipped_bit_of_a_signed_manifest_is_noticed(spes: Spes, tmp_path: Path, organizer: Identity) -> None:
    write_toml(tmp_path, complete(tmp_path))
    spes("run", "sign", "run.toml", "--key", "organizer.key")
    good = (tmp_path / "run.spes").read_bytes()
    for position in range(0, len(good), 97):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        (tmp_path / "run.spes").write_bytes(bad)
        result = spes("run", "show", "run.spes")
        assert result.code == 1, position
        assert re.match(r"(decode|signature|identity|size) failed for run\.spes: ", result.error)


def test_a_manifest_signed_by_somebody_else_is_refused(spes: Spes, tmp_path: Path, organizer: Identity) -> None:
    manifest = to_manifest(complete(tmp_path) | {"genesis_root": "11" * 32}, organizer.peer_id)
    (tmp_path / "forged.spes").write_bytes(seal(manifest, Identity.generate()).raw)
    result = spes("run", "show", "forged.spes")
    assert result.code == 1
    assert "identity failed for forged.spes" in result.error


def test_the_wrong_key_is_named(spes: Spes, tmp_path: Path, organizer: Identity) -> None:
    plain = complete(tmp_path)
    plain["organizer"] = {"keys": [organizer.peer_id]}
    write_toml(tmp_path, plain)
    other = spes("keys", "new", "--key", "other.key", "--json").json["peer_id"]
    result = spes("run", "sign", "run.toml", "--key", "other.key")
    assert result.code == 2
    assert organizer.peer_id in result.error and other in result.error
    result = spes("run", "sign", "run.toml", "--key", "none.key")
    assert result.code == 2
    assert "make one with: spes keys new --key none.key" in result.error
    assert not (tmp_path / "run.spes").exists()


@pytest.mark.parametrize("output", ["missing/run.spes", ".", "run.toml/run.spes"])
def test_an_output_that_cannot_be_written(spes: Spes, tmp_path: Path, organizer: Identity, output: str) -> None:
    write_toml(tmp_path, complete(tmp_path))
    before = sorted(path.name for path in tmp_path.iterdir())
    for command in (("sign", "run.toml", "--key", "organizer.key"), ("new", "--preset", "tiny", "--force")):
        result = spes("run", *command, "-o", output)
        assert result.code == 2
        assert output.removesuffix("/run.spes") in result.error
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_check_data_names_the_file_that_differs(spes: Spes, tmp_path: Path, organizer: Identity) -> None:
    write_toml(tmp_path, complete(tmp_path))
    assert spes("run", "sign", "run.toml", "--key", "organizer.key", "--check-data").code == 0
    (tmp_path / "run.spes").unlink()
    with (tmp_path / "heldout.npy").open("r+b") as file:
        file.write(b"\0")
    result = spes("run", "sign", "run.toml", "--key", "organizer.key", "--check-data")
    assert result.code == 1
    assert f"blob_digest failed for {tmp_path / 'heldout.npy'}" in result.error
    (tmp_path / "train.npy").unlink()
    result = spes("run", "sign", "run.toml", "--key", "organizer.key", "--check-data")
    assert result.code == 2
    assert f"cannot read {tmp_path / 'train.npy'}: No such file or directory" in result.error
    assert not (tmp_path / "run.spes").exists()


_PEER = Identity.from_seed(bytes(32)).peer_id


def test_sizes_count_what_a_round_sends(tmp_path: Path) -> None:
    plain = complete(tmp_path)
    plain["ownership"]["min_peers"] = 2
    sizes = Sizes.of(to_manifest(plain, _PEER))
    expert = 3 * 16 * 8
    assert sizes.parameters_group == 4 * expert
    assert sizes.parameters == sizes.parameters_shared + 16 * expert
    assert sizes.parameters_active == sizes.parameters_shared + 2 * expert
    assert sizes.groups_per_peer == 2
    assert sizes.contribution_bytes == sizes.shared_bytes + 2 * sizes.group_bytes
    assert sizes.round_bytes == 2 * sizes.shared_bytes + 4 * sizes.group_bytes
    assert sizes.round_bytes_fp32 == 4 * (2 * sizes.parameters_shared + 16 * expert)


@pytest.mark.parametrize(("min_peers", "quota"), [(1, 64), (3, 64), (4, 64), (4, 2)])
def test_what_a_peer_fetches_is_the_plans_figure(min_peers: int, quota: int, tmp_path: Path) -> None:
    plain = complete(tmp_path)
    plain["ownership"]["min_peers"] = min_peers
    plain["rounds"]["shared_quota"] = quota
    manifest = to_manifest(plain, _PEER)
    subject = of_manifest(manifest)
    planned = traffic(subject.files(), **subject.share())
    text = dict(size_rows(manifest))["and fetches"]
    assert text.startswith(f"about {bytes_text(planned.received)} a round, with {min_peers} peers")


def test_an_unknown_preset_and_a_wrong_name(spes: Spes, tmp_path: Path) -> None:
    result = spes("run", "new", "--preset", "3b")
    assert (result.code, result.error) == (2, "no preset '3b'; expected one of tiny, 1b, 2b, 7b, 9b")
    result = spes("run", "new", "--preset", "tiny", "--name", "a\tb")
    assert result.code == 2
    assert "name = 'a\\tb': expected a name of letters" in result.error
    result = spes("run", "new")
    assert result.code == 2
    assert "--preset; see: spes run new --help" in result.error
    assert not (tmp_path / "run.toml").exists()


def test_new_does_not_overwrite(spes: Spes, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("mine")
    result = spes("run", "new", "--preset", "tiny")
    assert result.code == 2
    assert "overwrite it with --force" in result.error
    assert (tmp_path / "run.toml").read_text() == "mine"
    assert spes("run", "new", "--preset", "tiny", "--force").code == 0
    assert (tmp_path / "run.toml").read_text() != "mine"


def test_rendered_toml_reads_back_whatever_the_text_holds() -> None:
    plain = new_manifest("tiny", seed=1)
    plain["description"] = 'quotes " and \\ and\nlines\tand \x7f \x01 and ü 🙂'
    back = tomllib.loads(render(plain))
    assert back["description"] == plain["description"]
    assert back["data"]["heldout_bytes"] == FILL_IN
    assert back["model"].items() >= plain["model"].items()
    assert back["rounds"]["phases"] == plain["rounds"]["phases"]


def test_every_key_has_a_meaning_and_the_reference_lists_it() -> None:
    records = {cls.__name__: cls for cls in vars(manifest_module).values() if dataclasses.is_dataclass(cls)}
    records = {name: cls for name, cls in records.items() if cls.__module__ == manifest_module.__name__}
    assert {name: {field.name for field in dataclasses.fields(record)} for name, record in records.items()} == {
        name: set(meanings) for name, meanings in MEANINGS.items()
    }
    page = (ROOT / "docs" / "manifest.md").read_text()
    assert page == reference(), "run: python -m spes_client.manifest_toml > docs/manifest.md"
    for key in keys():
        assert key.meaning and key.allowed
        assert f"| `{key.path.rpartition('.')[2]}` | {key.kind} | {key.allowed} |" in page


@pytest.fixture
def text_files(tmp_path: Path) -> Path:
    """A tokenizer of bytes, three documents as jsonl and txt."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab", "cdé", "")))
    (tmp_path / "doc.txt").write_text("hello")
    return tmp_path


def test_digest_counts_tokens_of_text_and_arrays(spes: Spes, text_files: Path) -> None:
    np.save(text_files / "a.npy", np.zeros(11, np.uint32))
    tables = spes("run", "digest", "docs.jsonl", "doc.txt", "a.npy", "--tokenizer", "tokenizer.json", "--json").json
    assert [table["table"] for table in tables] == ["data.tokenizer", *["data.sources.shards"] * 3]
    assert [table.get("tokens") for table in tables] == [None, 2 + 4 + 0 + 3, 5 + 1, 11]
    assert tables[0]["eos_id"] == 0
    assert tables[1]["url"] == str(text_files / "docs.jsonl")
    assert tables[1]["bytes"] == (text_files / "docs.jsonl").stat().st_size


def test_digest_prints_what_a_manifest_takes(spes: Spes, text_files: Path, organizer: Identity) -> None:
    plain = complete(text_files)
    plain["model"]["vocab_size"] = 257
    (text_files / "long.txt").write_text("x" * 200)
    train = spes("run", "digest", "long.txt", "--tokenizer", "tokenizer.json").out
    heldout = spes("run", "digest", "docs.jsonl", "--heldout", "--tokenizer", "tokenizer.json").out
    assert "heldout_bytes = 6" in heldout
    data = tomllib.loads(train)["data"]
    held = tomllib.loads(heldout[heldout.index("[data.tokenizer]") :])["data"]
    plain["data"] = {
        "heldout_bytes": 6,
        "tokenizer": data["tokenizer"],
        "sources": [{"name": "train", "format": "txt", "shards": data["sources"]["shards"]}],
        "heldout": {"name": "heldout", "format": "jsonl", "shards": held["heldout"]["shards"]},
    }
    write_toml(text_files, plain)
    result = spes("run", "sign", "run.toml", "--key", "organizer.key", "--check-data")
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("doc.txt",), 2, "name it with --tokenizer"),
        (("tokenizer.json",), 2, "name it with --format npy|txt|jsonl|parquet"),
        (("missing.npy",), 2, "cannot read missing.npy: No such file or directory"),
        (("doc.txt", "--format", "npy"), 2, "doc.txt is no .npy file"),
        (("doc.txt", "--tokenizer", "doc.txt"), 2, "no tokenizer file"),
        (("doc.txt", "--tokenizer", "tokenizer.json", "--eos-token", "<e>"), 2, "has no token <e>"),
        (("doc.txt", "--format", "zip"), 2, "'zip': expected one of npy, txt, jsonl, parquet"),
        (("foo://x/y.npy",), 2, "cannot read foo://x/y.npy"),
        ((), 2, "nothing to describe"),
    ],
)
def test_digest_says_what_is_wrong(spes: Spes, text_files: Path, args: tuple[str, ...], code: int, words: str) -> None:
    result = spes("run", "digest", *args)
    assert result.code == code
    assert words in result.error


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """An HTTP server over `tmp_path`."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def test_digest_reads_addresses(spes: Spes, text_files: Path, server: str) -> None:
    url = f"{server}/docs.jsonl"
    (local,) = spes("run", "digest", "docs.jsonl", "--tokenizer", "tokenizer.json", "--json").json[1:]
    (remote,) = spes("run", "digest", url, "--tokenizer", f"{server}/tokenizer.json", "--json").json[1:]
    assert remote == local | {"url": url}
    result = spes("run", "digest", f"{server}/nothing.npy")
    assert result.code == 3
    assert f"cannot read {server}/nothing.npy" in result.error
