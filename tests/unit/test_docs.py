"""The pages for people: what they cite exists, what exists they name, and what they tell to type is understood."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spes_bootstrap.main import build_parser as bootstrap_parser
from spes_client.join import build_parser as join_parser
from spes_client.main import build_parser as spes_parser
from spes_client.main import main as spes
from spes_client.manifest_toml import to_manifest
from spes_client.presets import new_manifest
from spes_client.replay import build_parser as replay_parser
from spes_client.run_summary import size_rows
from spes_p2p.crypto.envelope import KINDS
from spes_p2p.crypto.keys import Identity
from spes_protocols.messages import CHECKS, RESERVED_KINDS
from tests.unit.cli_support import complete

ROOT = Path(__file__).resolve().parents[2]
CODE = ("spes_p2p", "client", "bootstrap", "protocols", "tests", "benchmarks")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "protocols" / "SPEC.md"])
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "spes": spes_parser,
    "spes-join": join_parser,
    "spes-bootstrap": bootstrap_parser,
    "spes-replay": replay_parser,
}

_NUMBER = r"\d{1,2}(?:\.\d{1,2})?"
_CITATION = re.compile(rf"SPEC ({_NUMBER}(?:(?:, | and | to )(?:SPEC )?{_NUMBER}\b(?!\.\d))*)")


def spec() -> str:
    """The specification."""
    return (ROOT / "protocols" / "SPEC.md").read_text(encoding="utf-8")


def rules(text: str) -> set[str]:
    """Numbers of the sections ("## 4. Members") and of the rules ("**4.2 Claims.**") of a specification."""
    return set(re.findall(r"^## (\d+)\.", text, re.MULTILINE)) | set(
        re.findall(r"^\*\*(\d+\.\d+) ", text, re.MULTILINE)
    )


def cited(text: str) -> Iterator[str]:
    """Numbers that a text cites as "SPEC 4.2", "SPEC 6.2, 6.3" or "SPEC 4.3 to 4.6"."""
    for match in _CITATION.finditer(text):
        yield from re.findall(_NUMBER, match[1])


def test_citations_are_found() -> None:
    found = list(cited("(SPEC 2), (SPEC 6.2, 6.3), SPEC 4.3 to 4.6; SPEC 5; arXiv 1807.04938, SPEC 12."))
    assert found == ["2", "6.2", "6.3", "4.3", "4.6", "5", "12"]


def test_rules_are_found() -> None:
    assert rules("## 4. Members\n\n**4.1 Table.** As in **4.9 x**.\n") == {"4", "4.1"}


def test_rules_that_the_code_cites_exist() -> None:
    known = rules(spec())
    sources = [path for folder in CODE for suffix in ("py", "proto") for path in (ROOT / folder).rglob(f"*.{suffix}")]
    assert len(sources) > 50
    wrong = [
        f"{path.relative_to(ROOT)}: SPEC {number}"
        for path in sources
        if path != Path(__file__)
        for number in cited(path.read_text(encoding="utf-8"))
        if number not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_rules_that_the_specification_cites_itself_exist() -> None:
    known = rules(spec())
    # A number after a bracket, "in", "of", "to", "by" or a comma; numbers of other things stand in code or have units.
    found = re.findall(r"(?:\(|\bin |\bof |\bby )(\d{1,2}\.\d{1,2})(?=[),;. ])", spec())
    assert len(found) > 20
    assert sorted(set(found) - known) == []


def test_rules_are_numbered_without_gaps() -> None:
    numbers = re.findall(r"^\*\*(\d+)\.(\d+) ", spec(), re.MULTILINE)
    expected: dict[str, int] = {}
    for section, rule in numbers:
        expected[section] = expected.get(section, 0) + 1
        assert int(rule) == expected[section], f"{section}.{rule}"
    assert [int(section) for section in expected] == list(range(1, 13))


def test_the_specification_names_every_kind_and_check() -> None:
    named = set(re.findall(r"`([a-z_]+)`", spec()))
    assert {*KINDS, *RESERVED_KINDS, *CHECKS} <= named


@pytest.mark.parametrize("program", ["spes-join", "spes-bootstrap", "spes-replay"])
def test_the_page_of_commands_names_every_flag(program: str) -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    sections = re.split(r"^(?=##)", page, flags=re.MULTILINE)
    section = "".join(part for part in sections if re.match(rf"##+ `{program}[ `]", part))
    assert section
    for parser in _leaves(PARSERS[program]()):
        assert f"`{parser.prog}`" in section
        for action in parser._actions:
            for name in action.option_strings:
                assert re.search(rf"`{name}[ `]", section) or name in ("-h", "--help"), (parser.prog, name)


def _leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers that have no verbs of their own."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for child in (child for action in below for child in action.choices.values()):
        yield from _leaves(child)


def test_the_map_names_every_module() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = {Path(name).name for name in re.findall(r"`([\w/]+\.py)`", page)}
    folders = ("spes_p2p", "client", "bootstrap", "protocols", "benchmarks")
    modules = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    generated = {name for name in modules if name.endswith(("_pb2.py", "_pb2_grpc.py"))}
    assert modules - generated - {"__init__.py", "__main__.py"} - named == set()
    assert named - modules - {"test_tidy.py"} == set()


def anchors(text: str) -> set[str]:
    """What links to a page's headings say, as GitHub makes it of them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert linked.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(linked.read_text(encoding="utf-8")), target


def commands(text: str) -> Iterator[list[str]]:
    """Command lines of our programs in a page's code blocks, without comments, their continuation lines joined."""
    for block in re.findall(r"^ *```[a-z]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n *", "", block).splitlines():
            words = shlex.split(line.removeprefix("$ ").split("  # ")[0], comments=True) if _is_command(line) else []
            if words:
                yield words


def _is_command(line: str) -> bool:
    return re.match(rf"(\$ )?({'|'.join(PARSERS)}) [a-z-]", line) is not None


EXAMPLES = {
    "PEER_ID": "12D3KooW" + "A" * 44,
    "HEX": "ab" * 32,
    "N": "3",
}
"""What stands for a placeholder where a parser looks at the value."""


def test_commands_are_found() -> None:
    page = "```\n$ spes status --json   # a comment\nspes run sign \\\n    run.toml\nrun 'tiny'\n```\nspes pause\n"
    assert list(commands(page)) == [["spes", "status", "--json"], ["spes", "run", "sign", "run.toml"]]


def test_every_benchmark_has_its_command_on_the_page_of_benchmarks() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    programs = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - {"common.py"}
    assert programs == set(re.findall(r"^python benchmarks/(\w+\.py)", page, re.MULTILINE))


@pytest.mark.parametrize(
    "name", ["README.md", *(f"docs/{page}.md" for page in ("benchmarks", "lab", "organizer", "volunteer"))]
)
def test_commands_to_type_are_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SPES_PEER", "SPES_HOME", "SPES_KEY"):
        monkeypatch.delenv(variable, raising=False)
    found = list(commands((ROOT / name).read_text(encoding="utf-8")))
    assert len(found) > 5 or name in ("docs/volunteer.md", "docs/benchmarks.md")
    for program, *arguments in found:
        args = PARSERS[program]().parse_args([EXAMPLES.get(argument, argument) for argument in arguments])
        assert program in ("spes-join", "spes-bootstrap") or "handler" in args, (program, arguments)


_OF_A_MACHINE = re.compile(r"^(this machine|fits here) .*$|; more than is free here", re.MULTILINE)


def test_plans_on_the_page_of_benchmarks_are_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPES_HOME", str(tmp_path))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    plan = re.search(r"^```\n\$ spes (plan .*)\n((?:.*\n)*?)```", page, re.MULTILINE)
    cards = re.search(r"^```\n(a card of .*\n(?:.*\n)*?)```", page, re.MULTILINE)
    assert plan is not None and cards is not None
    assert spes(plan[1].split()) == 0
    printed = capsys.readouterr().out
    assert _OF_A_MACHINE.sub("", printed) == _OF_A_MACHINE.sub("", plan[2])
    assert spes([*plan[1].split(), "--all"]) == 0
    assert cards[1] in capsys.readouterr().out


def test_what_a_run_costs_stands_in_the_readme_as_it_is_printed(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    plain = complete(tmp_path) | {"model": new_manifest("tiny")["model"]}
    for _, value in size_rows(to_manifest(plain, Identity.from_seed(bytes(32)).peer_id)):
        assert value in readme
