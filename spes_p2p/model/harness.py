"""Benchmarks of an exported checkpoint with lm-evaluation-harness, an optional extra (`spes_p2p[eval]`).

    task names, or YAML files of local tasks --lm_eval--> one score for each task and metric

The harness is imported only when it runs. Where every task is a local file the hub is switched off before that, so that
nothing is looked up; otherwise the harness fetches the tasks' data.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spes_protocols.errors import NetworkError, UserError

_DEPTH_MAX = 8

EXTRA = "spes_p2p[eval]"
PACKAGES = "lm-eval==0.4.13 transformers accelerate"


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """Tasks, by name or file, with the same number of examples before each question; None: each task's own."""

    tasks: tuple[str, ...]
    fewshot: int | None = None


PAPER_TASKS = (
    TaskSet(tasks=("sciq", "piqa", "winogrande", "arc_easy", "social_iqa", "openbookqa", "boolq")),
    TaskSet(tasks=("arc_challenge",), fewshot=25),
    TaskSet(tasks=("hellaswag",), fewshot=10),
    TaskSet(tasks=("ceval-valid", "cmmlu", "mmlu")),
)
"""What the SPES paper's models are measured on, with the examples of its released evaluation script."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one task, as the harness names it; `stderr` None where it gives none."""

    task: str
    metric: str
    value: float
    stderr: float | None
    fewshot: int
    questions: int


def require_harness() -> None:
    """Raise `UserError` with what to install where the harness is missing."""
    missing = [name for name in ("lm_eval", "transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"spes eval runs lm-evaluation-harness, and {missing[0]} is not installed: pip install '{EXTRA}' (or "
            f"{PACKAGES}); --text and --heldout alone do without"
        )


def run_harness(
    checkpoint: Path, sets: Sequence[TaskSet], *, limit: int | None, batch_size: int, device: str, threads: int
) -> list[Score]:
    """Run the tasks of all sets on an exported checkpoint, in order.

    `device` is "auto", "cpu" or "cuda"; `limit` is questions of each task. Raises `UserError` for a task that is not
    there or a file that is none, `NetworkError` when a task's data cannot be had.
    """
    require_harness()
    files = {task: LocalTask.read(Path(task)) for tasks in sets for task in tasks.tasks if _is_file(task)}
    all_local = all(task in files for tasks in sets for task in tasks.tasks)
    if all_local:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # read when the libraries are imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    torch.set_num_threads(threads)
    folders = sorted({str(local.path.parent) for local in files.values()})
    manager = TaskManager(include_path=folders or None, include_defaults=not all_local)
    for task in (task for tasks in sets for task in tasks.tasks if task not in files):
        if task not in manager.all_tasks:
            raise UserError(f"lm-evaluation-harness knows no task {task!r}; give a name it has, or a task's YAML file")
    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    model = HFLM(pretrained=str(checkpoint), batch_size=batch_size, device=where)
    scores: list[Score] = []
    for tasks in sets:
        names = [files[task].name if task in files else task for task in tasks.tasks]
        try:
            found = lm_eval.simple_evaluate(
                model=model,
                tasks=names,
                num_fewshot=tasks.fewshot,
                limit=limit,
                task_manager=manager,
                log_samples=False,
            )
        except OSError as error:
            line = str(error).strip().splitlines()
            raise NetworkError(
                f"the data of {', '.join(names)} could not be had: {line[0] if line else error}"
            ) from None
        scores += _scores(found, names)
    return scores


@dataclass(frozen=True)
class LocalTask:
    """A task of the harness in a YAML file."""

    path: Path
    name: str

    @classmethod
    def read(cls, path: Path) -> LocalTask:
        """Raises `UserError` if the file is none, or names data that is not there by an absolute path."""
        import yaml  # a dependency of the harness

        class Loader(yaml.SafeLoader):  # type: ignore[misc]
            """Reads the harness's own tags, such as `!function`, as nothing."""

        Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
        try:
            plain = yaml.load(path.read_text("utf-8"), Loader)  # noqa: S506 - a SafeLoader
        except OSError as error:
            raise UserError(f"cannot read the task {path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
        name = plain.get("task") if isinstance(plain, dict) else None
        if not isinstance(name, str):
            raise UserError(f"{path} is not a task of lm-evaluation-harness: it has no name under `task`")
        options = plain.get("dataset_kwargs") or {}
        if not isinstance(options, dict):
            raise UserError(f"{path}: dataset_kwargs = {options!r:.80}: expected a table")
        for file in _data_files(options.get("data_files"), path):
            if "://" not in file and not (Path(file).is_absolute() and Path(file).is_file()):
                raise UserError(f"{path}: data_files names {file}: expected the absolute path of a file")
        return cls(path.absolute(), name)


def _is_file(task: str) -> bool:
    return Path(task).suffix in (".yaml", ".yml")


def _data_files(value: Any, path: Path, depth: int = 0) -> Iterator[str]:
    if depth > _DEPTH_MAX:  # YAML can make a list its own entry
        raise UserError(f"{path}: data_files is nested deeper than any list of files")
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _data_files(item, path, depth + 1)


def _scores(found: Any, names: Sequence[str]) -> list[Score]:
    """The metrics of the tasks asked for, in what the harness gives.

    A group that has metrics of its own is one task. Of one that has none, and of a tag, which is not in the answer at
    all, each task in it is shown.
    """
    children: dict[str, list[str]] = found.get("group_subtasks", {})
    inside = {child for members in children.values() for child in members}
    results = found["results"]
    wanted = [name for name in names if name in results or name in children]
    wanted += [name for name in results if name not in wanted and name not in inside]
    return [score for name in wanted for score in _scores_of(found, name, children)]


def _scores_of(found: Any, name: str, children: dict[str, list[str]]) -> Iterator[Score]:
    row = found["results"].get(name, {})
    tasks = _tasks_in(name, children)
    shots = {int(found.get("n-shot", {}).get(task, 0) or 0) for task in tasks}
    metrics = 0
    for key, value in row.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        metrics += 1
        error = row.get(f"{metric}_stderr,{filtered}")
        yield Score(
            task=name,
            metric=metric if filtered == "none" else f"{metric} ({filtered})",
            value=float(value),
            stderr=float(error) if isinstance(error, int | float) else None,
            fewshot=max(shots, default=0),
            questions=sum(found["n-samples"][task]["effective"] for task in tasks if task in found["n-samples"]),
        )
    if not metrics:
        for child in children.get(name, ()):
            yield from _scores_of(found, child, children)


def _tasks_in(name: str, children: dict[str, list[str]]) -> list[str]:
    """The tasks themselves in a group of tasks and groups, each once; of a task, itself."""
    if name not in children:
        return [name]
    return list(dict.fromkeys(task for child in children[name] for task in _tasks_in(child, children)))
