"""`spes export` and `spes eval`: out of a run or a state file, back in again, bits per byte, and the harness."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from spes_p2p.data.batches import TokenData
from spes_p2p.model import harness
from spes_p2p.model.evaluate import bits_per_byte
from spes_p2p.model.export import export_checkpoint, read_checkpoint
from spes_p2p.model.harness import LocalTask, TaskSet, run_harness
from spes_p2p.model.moe import MoE
from spes_p2p.store.first_state import SUFFIX
from spes_protocols.errors import UserError
from spes_protocols.manifest import Model
from tests.unit.cli_support import Spes
from tests.unit.log_support import MODEL, RunLog, play
from tests.unit.model_support import QWEN3, random_state


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    log = play(tmp_path_factory.mktemp("log"))
    log.close()
    return log


@pytest.fixture
def spes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spes:
    monkeypatch.setenv("SPES_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return Spes(capsys)


# ---- export ---------------------------------------------------------------------------------------------------------


def test_a_run_and_its_state_files_are_exported(spes: Spes, log: RunLog, tmp_path: Path) -> None:
    allow = ("--allow-source", log.folder.as_uri())
    answer = spes("export", log.home, "newest", "--json", *allow).json
    assert answer == {"out": "newest", "round": 5, "state_root": log.chain.head.state_root.hex()}
    answer = spes("export", log.home, "third", "--round", 3, "--json", *allow).json
    third = log.states.path(3)
    from_file = spes("export", third, "file", "--json", *allow).json
    assert from_file == {"out": "file", "round": None, "state_root": answer["state_root"]}
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "third" / name).read_bytes() == (tmp_path / "file" / name).read_bytes()

    shutil.copyfile(third, tmp_path / f"mine{SUFFIX}")
    result = spes("export", f"mine{SUFFIX}", "mine", *allow)
    assert (result.code, "give its run's manifest with --manifest FILE" in result.error) == (2, True)
    (tmp_path / "mine.spes").write_bytes(log.run.manifest.raw)
    tokenizer = log.folder / "tokenizer.json"
    assert spes("export", f"mine{SUFFIX}", "mine", "--tokenizer", tokenizer).code == 0
    assert spes("export", f"mine{SUFFIX}", "too", "--manifest", "mine.spes", "--tokenizer", tokenizer).code == 0
    for name in ("mine", "too"):
        tensors, state = load_file(tmp_path / name / "model.safetensors"), log.states.read(3)
        assert tensors.keys() == state.keys()
        assert all(np.array_equal(tensors[name], state[name]) for name in tensors)


def test_exports_that_are_refused(spes: Spes, log: RunLog, tmp_path: Path) -> None:
    state = log.states.path(3)
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    (tmp_path / "run.spes").write_bytes(log.run.manifest.raw)
    for command, message in (
        ((state, "out", "--round", 3), "is one state: leave out --round"),
        ((log.home, "out", "--manifest", "run.spes"), "--manifest goes with a state file"),
        (("nothing", "out"), "no run at nothing"),
        (("junk.safetensors", "out", "--manifest", "run.spes"), "is not a state of this manifest's model: 4 bytes"),
        ((state, "out"), "the tokenizer is not at hand"),
        ((state, "out", "--tokenizer", "none.json"), "cannot read the tokenizer none.json"),
        ((state, "out", "--tokenizer", "run.spes"), "give that one with --tokenizer FILE"),
        ((log.home, tmp_path), "exists and is not an empty directory"),
    ):
        result = spes("export", *command)
        assert result.code == 2
        assert message in result.error
        assert not (tmp_path / "out").exists()


SMALL = Model(
    vocab_size=300, hidden_size=24, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, num_experts=8,
    num_experts_per_tok=2, sequence_length=32,
)  # fmt: skip
TEXTS = ("Votes belong to expert groups. The ledger decides.\n", "Nobody is waited for: a late peer sends what it has.")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save(str(folder / "bpe.json"))
    export_checkpoint(random_state(SMALL), SMALL, 0, folder / "bpe.json", folder / "small")
    return folder / "small"


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": True, "num_key_value_heads": 2}, QWEN3], ids=str)
def test_an_export_is_read_back(tmp_path: Path, small: Path, changes: dict[str, Any]) -> None:
    model = Model(**{**vars(SMALL), **changes})
    state = random_state(model)
    export_checkpoint(state, model, 7, small / "tokenizer.json", tmp_path / "out")
    found = read_checkpoint(tmp_path / "out")
    assert (found.eos_id, found.model.kv_heads, found.model.head_width) == (7, model.kv_heads, model.head_width)
    tokens = torch.arange(20)[None]
    expected, loaded = MoE(model, 4), MoE(found.model, 1)
    expected.load(state)
    loaded.load(found.state)
    with torch.no_grad():
        assert torch.equal(expected(tokens), loaded(tokens))


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def endless(path: Path) -> None:
    """In a file's place a device that never ends."""
    path.unlink()
    path.symlink_to("/dev/zero")


def change_tensor(alter: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_torch(folder / "model.safetensors")
        tensors["model.norm.weight"] = alter(tensors["model.norm.weight"])
        save_torch(tensors, folder / "model.safetensors")

    return change


def test_an_export_that_says_the_rotary_base_once_is_read(small: Path, tmp_path: Path) -> None:
    """As they were written before both places were."""
    shutil.copytree(small, tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    config = json.loads(path.read_text())
    del config["rope_theta"]
    path.write_text(json.dumps(config))
    assert read_checkpoint(tmp_path / "old").model == read_checkpoint(small).model


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "write a checkpoint with: spes export RUN broken"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
        (
            lambda folder: (folder / "config.json").write_text(" " * 2**21),
            "config.json is larger than any configuration",
        ),
        (lambda folder: endless(folder / "config.json"), "config.json is larger than any configuration"),
        (change_config(eos_token_id="end"), "eos_token_id = 'end': expected a token below vocab_size = 300"),
        (change_config(eos_token_id=-1), "eos_token_id = -1: expected a token below vocab_size = 300"),
        (change_config(eos_token_id=300), "eos_token_id = 300: expected a token below vocab_size = 300"),
        (change_config(rope_theta=10_000.5), "is not as spes export writes it"),
        (change_tensor(lambda values: values.bfloat16()), "model.norm.weight is BF16 [24]: expected F32 [24]"),
        (change_tensor(lambda values: values[:-1].clone()), "model.norm.weight is F32 [23]: expected F32 [24]"),
        (change_tensor(lambda values: values * torch.nan), "gives nan bits per byte of a: its weights are damaged"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is not of a checkpoint that spes export wrote"),
        (change_config(hidden_size=7), "hidden_size = 7: expected a number from 8 to 65536"),
        (change_config(hidden_act="gelu"), "is not as spes export writes it"),
        (change_config(num_hidden_layers=2), "is not of the model in config.json: model.layers.1"),
        (lambda folder: (folder / "model.safetensors").write_text("x"), "cannot read broken/model.safetensors"),
    ],
)
def test_checkpoints_that_are_no_exports(
    spes: Spes, small: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    shutil.copytree(small, tmp_path / "broken")
    damage(tmp_path / "broken")
    (tmp_path / "text.txt").write_text("text")
    result = spes("eval", "broken", "--text", "a=text.txt")
    assert result.code == 2
    assert message in result.error


# ---- bits per byte --------------------------------------------------------------------------------------------------


def test_bits_per_byte_of_each_text(spes: Spes, small: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(TEXTS[0])
    (tmp_path / "two.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in TEXTS))
    texts = ("--text", "first=one.txt", "--text", "all=two.jsonl", "--text-key", "body")
    found = spes("eval", small, *texts, "--threads", 1, "--json").json
    assert found["tasks"] == []
    tokenizer = Tokenizer.from_file(str(small / "tokenizer.json"))
    state = read_checkpoint(small).state
    for row, name, parts in zip(found["texts"], ("first", "all"), (TEXTS[:1], TEXTS), strict=True):
        ids = [token for text in parts for token in [*tokenizer.encode(text).ids, 0]]
        size = sum(len(text.encode()) for text in parts)
        expected = bits_per_byte(state, SMALL, 1, np.array(ids), size, threads=1)
        assert row == {"name": name, "bytes": size, "tokens": len(ids), "bits_per_byte": expected}
        assert 1 < row["bits_per_byte"] < 20
    table = spes("eval", small, "--text", "[/first]\x1b[31m=one.txt").out
    assert f"{found['texts'][0]['bits_per_byte']:.4f}" in table
    assert "[/first] [31m" in table and "\x1b" not in table


def test_the_held_out_text_of_a_run(
    spes: Spes, small: Path, log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow = ("--allow-source", log.folder.as_uri())
    assert spes("export", log.home, "out", *allow).code == 0
    closed: list[bool] = []
    close = TokenData.close
    monkeypatch.setattr(TokenData, "close", lambda self: closed.append(True) or close(self))
    (row,) = spes("eval", "out", "--heldout", log.home, "--threads", 1, "--json", *allow).json["texts"]
    tokens = np.load(log.folder / "heldout.npy")
    expected = bits_per_byte(log.states.read(5), MODEL, 2, tokens, 400, threads=1)
    assert closed == [True]
    assert row == {"name": "heldout", "bytes": 400, "tokens": 200, "bits_per_byte": expected}
    result = spes("eval", small, "--heldout", log.home, *allow)
    assert result.code == 2 and "has another vocabulary than the run at" in result.error


def test_texts_that_cannot_be_measured(spes: Spes, small: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "page.html").write_text("text")
    for given, message in (
        ("one.txt", "expected NAME=FILE"),
        ("a=page.html", "expected a text file that ends in .txt, .jsonl or .parquet"),
        ("a=none.txt", "no file none.txt"),
        ("a=empty.txt", "holds no text to measure"),
    ):
        result = spes("eval", small, "--text", given)
        assert result.code == 2
        assert message in result.error


# ---- the harness ----------------------------------------------------------------------------------------------------


def test_without_the_harness_one_line_says_what_to_install(
    spes: Spes, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None if name == "lm_eval" else real(name))
    result = spes("eval", small)
    assert result.code == 2
    assert "lm_eval is not installed: pip install 'spes_p2p[eval]' (or lm-eval==0.4.13" in result.error


TASK = """
task: words
dataset_path: json
dataset_kwargs:
  data_files: {{test: {path}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
process_docs: !function utils.nothing
metric_list: [{{metric: acc}}]
"""


def test_local_tasks_that_cannot_be_read(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}")
    path = tmp_path / "task.yaml"
    path.write_text(TASK.format(path=data))
    assert LocalTask.read(path) == LocalTask(path, "words")
    for text, message in (
        (TASK.format(path="data.jsonl"), "data_files names data.jsonl: expected the absolute path of a file"),
        (TASK.format(path=tmp_path / "none"), "expected the absolute path of a file"),
        ("tag: words", "it has no name under `task`"),
        ("a: [", "is not YAML: while parsing"),
        ("[" * 5000, "is not YAML"),
        ("task: words\ndataset_kwargs: [1]", "dataset_kwargs = .1.: expected a table"),
        ("task: words\ndataset_kwargs: {data_files: &a [*a]}", "data_files is nested deeper than any list of files"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            LocalTask.read(path)
    with pytest.raises(UserError, match="cannot read the task"):
        LocalTask.read(tmp_path / "none.yaml")


def metrics(acc: float) -> dict[str, Any]:
    return {"alias": "x", "acc,none": acc, "acc_stderr,none": acc / 10, "sample_len": 7}


def samples(count: int) -> dict[str, int]:
    return {"original": 100, "effective": count}


ANSWER = {
    "results": {
        "one": metrics(0.1), "hard": metrics(0.2), "law": metrics(0.3), "logic": metrics(0.4),
        "exams": metrics(0.35), "humanities": metrics(0.35), "sums": {"alias": "sums"}, "add": metrics(0.5),
        "first": metrics(0.6), "second": metrics(0.7),
    },
    "group_subtasks": {"exams": ["humanities", "logic"], "humanities": ["law"], "sums": ["add"], "bare": ["hard"]},
    "n-shot": {"one": 5, "law": 3, "logic": 3, "humanities": 3, "add": 2, "hard": 0, "first": 0, "second": 0},
    "n-samples": {
        "one": samples(10), "law": samples(20), "logic": samples(30), "add": samples(40), "hard": samples(50),
        "first": samples(60), "second": samples(70),
    },
}  # fmt: skip
"""In the harness's form: a group of groups, groups without metrics of their own, two tasks that a tag named."""


def test_groups_and_tags_of_the_harness_are_read() -> None:
    """A group of groups has its tasks' questions; a group without metrics and a tag are the tasks in them."""
    scores = harness._scores(ANSWER, ["one", "exams", "sums", "bare", "a tag"])
    assert [(score.task, score.value, score.fewshot, score.questions) for score in scores] == [
        ("one", 0.1, 5, 10), ("exams", 0.35, 3, 50), ("add", 0.5, 2, 40), ("hard", 0.2, 0, 50),
        ("first", 0.6, 0, 60), ("second", 0.7, 0, 70),
    ]  # fmt: skip
    assert {(score.metric, score.stderr == score.value / 10) for score in scores} == {("acc", True)}


QUESTIONS = [
    {"question": "Votes belong to", "choices": [" expert groups", " nobody"], "gold": 0},
    {"question": "The ledger", "choices": [" sends", " decides"], "gold": 1},
    {"question": "Nobody is", "choices": [" waited for", " late"], "gold": 0},
    {"question": "A late peer", "choices": [" decides", " sends what it has"], "gold": 1},
]


def test_the_harness_gives_what_the_model_says(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="the extra spes_p2p[eval] is not installed")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")  # so that they are put back
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    data, task = tmp_path / "data.jsonl", tmp_path / "task.yaml"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    task.write_text(TASK.format(path=data).replace("process_docs: !function utils.nothing\n", ""))
    scores = run_harness(
        small, (TaskSet(tasks=(str(task),)),), limit=None, batch_size=3, device="cpu", threads=1
    )  # fmt: skip

    checkpoint = read_checkpoint(small)
    moe = MoE(checkpoint.model, 1)
    moe.load(checkpoint.state)
    tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_path))

    def loglikelihood(question: str, choice: str) -> float:
        ids, begin = tokenizer.encode(question + choice).ids, len(tokenizer.encode(question).ids)
        with torch.no_grad():
            logs = moe(torch.tensor([ids])).log_softmax(-1)[0]
        return math.fsum(float(logs[place - 1, ids[place]]) for place in range(begin, len(ids)))

    right = [
        int(np.argmax([loglikelihood(row["question"], choice) for choice in row["choices"]])) == row["gold"]
        for row in QUESTIONS
    ]
    (score,) = scores
    assert (score.task, score.metric, score.fewshot, score.questions) == ("words", "acc", 0, 4)
    assert score.value == sum(right) / 4
