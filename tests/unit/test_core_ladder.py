"""The ladder of checks: what a header may say, what may be refused, norms over a set (SPEC 7)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.core.head import Head
from spes_p2p.core.ladder import BLOB_CHECKS, check_header, check_refusal, expected_sections, norm_offenders
from spes_p2p.core.members import by_shared_lot
from spes_protocols.errors import RemoteError
from spes_protocols.messages import CHECKS, Header, Member, Section, Signed
from tests.sim.records import make_header, make_manifest, peer_name, seal
from tests.unit.test_core_members import four, head_with

A, B, C, D, E, F = (peer_name(number) for number in range(6))
MANIFEST = make_manifest(groups=6, min_peers=3)
HEAD = head_with(MANIFEST, [Member(peer=A, groups=(0, 5)), Member(peer=B, groups=(1,)), Member(peer=E, wants=1)])


def refuse(header: Signed[Header], head: Head = HEAD) -> str:
    """The name of the check a header fails, an empty string if none."""
    try:
        check_header(MANIFEST, head, header)
    except RemoteError as error:
        return error.check if error.peer == header.signer else "no peer"
    return ""


def test_each_member_sends_the_shared_section_and_its_groups() -> None:
    assert expected_sections(MANIFEST, HEAD, A) == ("shared", "group/0", "group/5")
    assert expected_sections(MANIFEST, HEAD, E) == ("shared",)
    assert expected_sections(MANIFEST, HEAD, F) == ()


def test_who_was_not_drawn_sends_no_shared_section() -> None:
    manifest = make_manifest(shared_quota=1)
    head = four(manifest, Member(peer=E))
    drawn = by_shared_lot(head.members, head.id)[0]
    for member in head.members:
        groups = tuple(f"group/{g}" for g in member.groups)
        expected = ("shared", *groups) if member.peer == drawn else groups
        assert expected_sections(manifest, head, member.peer) == expected


def test_a_good_header_passes() -> None:
    assert [refuse(make_header(MANIFEST, HEAD, peer)) for peer in (A, B, E)] == ["", "", ""]


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"run_id": b"x" * 32}, "run"),
        ({"epoch": b"x" * 32}, "epoch"),
        ({"round": 8}, "round"),
        ({"base": b"x" * 32}, "base"),
        ({"state_root": b"x" * 32}, "base"),
        ({"tokens": 0}, "sections"),
        ({"tokens": 81}, "sections"),
        ({"steps": 0}, "sections"),
        ({"steps": 6}, "sections"),
    ],
)
def test_each_field_is_checked(changes: dict[str, Any], check: str) -> None:
    assert refuse(make_header(MANIFEST, HEAD, A, **changes)) == check


def test_the_sections_are_exactly_those_expected_in_their_codecs_and_sizes() -> None:
    good = make_header(MANIFEST, HEAD, A).record
    shared, *groups = good.sections

    def with_sections(*sections: Section) -> str:
        return refuse(seal(replace(good, sections=sections), A))

    assert with_sections(shared, *groups) == ""
    assert with_sections(shared) == "sections"
    assert with_sections(*groups, shared) == "sections"
    assert with_sections(shared, *groups, replace(groups[0], name="group/1")) == "sections"
    assert with_sections(replace(shared, codec="fp32"), *groups) == "sections"
    assert with_sections(replace(shared, size=2**40), *groups) == "size"
    assert refuse(seal(good, F)) == "sections"


def provable(check: str, header: Signed[Header]) -> bool:
    """Whether a set may list this refusal."""
    try:
        check_refusal(MANIFEST, HEAD, check, header)
    except RemoteError as error:
        return error.check != "refusal"
    return True


def test_a_refusal_names_the_check_that_its_header_fails() -> None:
    good, bad = make_header(MANIFEST, HEAD, A), make_header(MANIFEST, HEAD, A, state_root=b"x" * 32)
    assert {check for check in CHECKS if provable(check, good)} == set(BLOB_CHECKS)
    assert {check for check in CHECKS if provable(check, bad)} == {"base"}


def test_headers_from_elsewhere_are_no_offence() -> None:
    for changes in ({"run_id": b"x" * 32}, {"epoch": b"x" * 32}, {"round": 6}, {"base": b"x" * 32}):
        header = make_header(MANIFEST, HEAD, A, **changes)
        assert not any(provable(check, header) for check in CHECKS)
    outsider = seal(make_header(MANIFEST, HEAD, A).record, F)
    assert not any(provable(check, outsider) for check in CHECKS)


def test_norms_are_compared_within_their_kind() -> None:
    norms = {
        A: {"shared": 1.0, "group/0": 400.0},
        B: {"shared": 1.2, "group/1": 300.0},
        C: {"shared": 0.9, "group/2": 500.0},
    }
    votes = dict.fromkeys(norms, 1)
    assert norm_offenders(norms, votes, 10.0) == frozenset()
    assert norm_offenders(norms | {D: {"shared": 100.1}}, votes | {D: 1}, 10.0) == {D}
    assert norm_offenders(norms | {D: {"shared": 99.9, "group/3": 4.1e4}}, votes | {D: 1}, 10.0) == {D}


def test_the_smaller_of_two_sets_the_scale() -> None:
    votes = {A: 1, B: 1}
    assert norm_offenders({A: {"shared": 1.0}, B: {"shared": 101.0}}, votes, 10.0) == {B}
    assert norm_offenders({A: {"shared": 1.0}, B: {"shared": 100.0}}, votes, 10.0) == frozenset()


def test_standbys_do_not_move_the_scale() -> None:
    honest = {A: {"shared": 1.0}, B: {"shared": 1.1}}
    crowd = {peer_name(number): {"shared": 0.0} for number in range(10, 60)}
    assert norm_offenders(honest | crowd, {A: 1, B: 1}, 10.0) == frozenset()
    assert norm_offenders(crowd | {A: {"shared": 5.0}}, {}, 10.0) == frozenset()


@given(st.dictionaries(st.sampled_from([A, B, C, D, E, F]), st.floats(0, 1e12), min_size=1))
def test_less_than_half_of_the_votes_can_not_have_the_others_refused(values: dict[str, float]) -> None:
    honest = sorted(values)[: len(values) // 2 + 1]
    norms = {peer: {"shared": 1.0 if peer in honest else values[peer]} for peer in values}
    offenders = norm_offenders(norms, dict.fromkeys(values, 1), 10.0)
    assert offenders == {peer for peer in values if peer not in honest and norms[peer]["shared"] > 100.0}
