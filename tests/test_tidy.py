"""House rules that the linters do not know, checked on the sources' syntax trees.

Each rule is a function from one parsed file to the problems in it; `BROKEN` holds what each rule must catch, so a rule
that stops seeing anything fails too.
"""

import ast
import configparser
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("spes_p2p", "client/spes_client", "bootstrap/spes_bootstrap", "protocols/spes_protocols")
OTHER_CODE = ("tests", "benchmarks")

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
DOCUMENTED_SHARE_MIN = 0.95

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
SLEEPERS = {"time", "asyncio", "trio", "anyio"}
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"torch.load", "torch.save"}
BROAD = {"Exception", "BaseException"}
MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:home|root|work|Users|private|mnt)/\w")
TEXT_SUFFIXES = {".cfg", ".ini", ".md", ".proto", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml", ".yml"}
TEXT_NAMES = {"Dockerfile", "Makefile", "run"}
SKIPPED_DIRS = {"build", "dist", "demo-run", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A Python file: its path from the root, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> "Source":
        """Read a file's text; a file that does not parse fails the test that asked for it."""
        return cls(path=path, text=text, tree=ast.parse(text, filename=path))


Problem = tuple[int, str]


def sources(*folders: str) -> list[Source]:
    """Every Python file under the folders, without the generated ones."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [
        Source.parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    ]


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of names, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def imported(node: ast.AST) -> list[str]:
    """Full names that an import statement brings in."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def module_too_long(source: Source) -> Iterator[Problem]:
    """A module is read in one sitting."""
    lines = len(source.text.splitlines())
    if lines > MODULE_LINES_MAX:
        yield 1, f"{lines} lines, at most {MODULE_LINES_MAX}"


def function_too_long(source: Source) -> Iterator[Problem]:
    """A function fits on a screen; its decorators do not count."""
    for node in ast.walk(source.tree):
        if isinstance(node, FUNCTIONS):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def no_module_docstring(source: Source) -> Iterator[Problem]:
    """Every module says what it is."""
    if not ast.get_docstring(source.tree):
        yield 1, "no module docstring"


def sleeping(source: Source) -> Iterator[Problem]:
    """Tests wait for what they need, not for time to pass; `sleep(0)` only yields to other tasks."""
    for node in ast.walk(source.tree):
        for name in imported(node):
            module, _, last = name.rpartition(".")
            if module in SLEEPERS and last == "sleep":
                yield node.lineno, f"imports {name}"
        if isinstance(node, ast.Call):
            module, _, last = dotted(node.func).rpartition(".")
            yields = [ast.unparse(argument) for argument in node.args] == ["0"]
            if module in SLEEPERS and last == "sleep" and not yields:
                yield node.lineno, f"calls {module}.sleep"


def unsafe_loading(source: Source) -> Iterator[Problem]:
    """Nothing that came over the network or lies on disk may run code when it is read."""
    for node in ast.walk(source.tree):
        for name in imported(node):
            if name.split(".")[0] in UNSAFE_MODULES or name in UNSAFE_CALLS:
                yield node.lineno, f"imports {name}"
        if isinstance(node, ast.Attribute) and dotted(node) in UNSAFE_CALLS:
            yield node.lineno, f"uses {dotted(node)}"
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.value.lineno, "allows pickled arrays"


def swallowed_errors(source: Source) -> Iterator[Problem]:
    """Whoever catches everything raises again or says what was caught."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield node.lineno, "bare except"
            elif _is_broad(node.type) and not _is_handled(node):
                yield node.lineno, f"except {ast.unparse(node.type)} neither raises nor reports the error"
        suppresses = isinstance(node, ast.Call) and dotted(node.func) in {"suppress", "contextlib.suppress"}
        if suppresses and any(_is_broad(argument) for argument in node.args):
            yield node.lineno, "suppresses every error"


def _is_broad(caught: ast.expr) -> bool:
    parts = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(dotted(part) in BROAD for part in parts)


def _is_handled(handler: ast.ExceptHandler) -> bool:
    for node in (inner for statement in handler.body for inner in ast.walk(statement)):
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Name) and node.id == handler.name:
            return True
        if isinstance(node, ast.Call) and dotted(node.func).endswith(".exception"):
            return True
    return False


def public_definitions(source: Source) -> Iterator[tuple[str, bool, int]]:
    """(name, has a docstring, line) of the public classes, functions and methods of a module."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, bool, int]]:
        for node in body:
            if not isinstance(node, DEFINITIONS) or node.name.startswith("_"):
                continue
            if {dotted(mark).split(".")[-1] for mark in node.decorator_list} & {"overload", "setter"}:
                continue
            yield prefix + node.name, ast.get_docstring(node) is not None, node.lineno
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")

    yield from visit(source.tree.body, "")


Rule = Callable[[Source], Iterator[Problem]]

EVERYWHERE = (*PACKAGES, *OTHER_CODE)

RULES: dict[Rule, tuple[str, ...]] = {
    module_too_long: EVERYWHERE,
    function_too_long: EVERYWHERE,
    no_module_docstring: EVERYWHERE,
    sleeping: ("tests",),
    unsafe_loading: EVERYWHERE,
    swallowed_errors: EVERYWHERE,
}

BROKEN: list[tuple[Rule, str]] = [
    (module_too_long, "x = 1\n" * (MODULE_LINES_MAX + 1)),
    (function_too_long, "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    (function_too_long, "class C:\n    async def f():\n" + "        x = 1\n" * FUNCTION_LINES_MAX),
    (no_module_docstring, "x = 1\n"),
    (no_module_docstring, ""),
    (sleeping, "import time\ntime.sleep(1)\n"),
    (sleeping, "from time import sleep\n"),
    (sleeping, "async def f():\n    await asyncio.sleep(0.1)\n"),
    (unsafe_loading, "import pickle\n"),
    (unsafe_loading, "from pickle import loads\n"),
    (unsafe_loading, "from torch import load\n"),
    (unsafe_loading, "torch.load(path)\n"),
    (unsafe_loading, "np.load(path, allow_pickle=True)\n"),
    (swallowed_errors, "try:\n    f()\nexcept:\n    raise\n"),
    (swallowed_errors, "try:\n    f()\nexcept Exception:\n    pass\n"),
    (swallowed_errors, "try:\n    f()\nexcept (OSError, BaseException) as error:\n    x = 1\n"),
    (swallowed_errors, "with contextlib.suppress(Exception):\n    f()\n"),
]

SOUND: list[tuple[Rule, str]] = [
    (function_too_long, "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1)),
    (sleeping, "async def f():\n    await asyncio.sleep(0)\n"),
    (unsafe_loading, "np.load(path, mmap_mode='r', allow_pickle=False)\n"),
    (swallowed_errors, "try:\n    f()\nexcept OSError:\n    pass\n"),
    (swallowed_errors, "try:\n    f()\nexcept BaseException:\n    undo()\n    raise\n"),
    (swallowed_errors, "try:\n    f()\nexcept Exception as error:\n    report(error)\n"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_sources_keep_the_rule(rule: Rule) -> None:
    found = [f"{source.path}:{line}: {what}" for source in sources(*RULES[rule]) for line, what in rule(source)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(("rule", "text"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_the_rule_sees_what_breaks_it(rule: Rule, text: str) -> None:
    assert list(rule(Source.parse("example.py", text)))


@pytest.mark.parametrize(("rule", "text"), SOUND, ids=lambda value: getattr(value, "__name__", ""))
def test_the_rule_lets_sound_code_pass(rule: Rule, text: str) -> None:
    assert not list(rule(Source.parse("example.py", text)))


def test_public_names_are_documented() -> None:
    found = [(source.path, *entry) for source in sources(*PACKAGES) for entry in public_definitions(source)]
    missing = [f"{path}:{line}: {name}" for path, name, documented, line in found if not documented]
    share = 1 - len(missing) / len(found)
    assert share >= DOCUMENTED_SHARE_MIN, f"{share:.1%} of {len(found)} documented; missing:\n" + "\n".join(missing)


def test_public_definitions_are_found() -> None:
    text = (
        'def f():\n    """F."""\n'
        "class C:\n    def g(self): ...\n    def _h(self): ...\n"
        "class _D:\n    def k(self): ...\n"
    )
    found = [(name, documented) for name, documented, _ in public_definitions(Source.parse("example.py", text))]
    assert found == [("f", True), ("C", False), ("C.g", False)]


def text_files() -> list[Path]:
    """Every file that a person wrote, wherever it lies in the checkout."""
    found: list[Path] = []
    for folder, names, files in os.walk(ROOT):
        hidden = {name for name in names if name.startswith(".") and name != ".ci"}
        names[:] = [name for name in names if name not in SKIPPED_DIRS | hidden and not name.endswith(".egg-info")]
        found += [Path(folder, name) for name in files if Path(name).suffix in TEXT_SUFFIXES or name in TEXT_NAMES]
    return found


def test_no_machine_paths() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, "\n" + "\n".join(found)


def test_machine_paths_are_recognised() -> None:
    assert MACHINE_PATH.search("open('/" + "home/somebody/x')")
    assert not MACHINE_PATH.search("https://example.org/home/somebody and ~/work/x and docs/work/x")


def test_every_package_is_installed_and_has_its_layer() -> None:
    in_tree = {
        path.parent.relative_to(ROOT / folder.rpartition("/")[0]).as_posix().replace("/", ".")
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("__init__.py")
    }
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert set(setup["options"]["packages"].split()) == in_tree

    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = {contract["id"]: contract for contract in tools["importlinter"]["contracts"]}
    layers = {name.strip() for layer in contracts["layers"]["layers"] for name in layer.split("|")}
    assert layers == in_tree - {"spes_p2p"}
