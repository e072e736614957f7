"""Whom to ask for a blob and which first, as pure choices; what is remembered of holders, and for how long."""

from __future__ import annotations

from spes_p2p.peer.holders import (
    AHEAD,
    ASKED_FIRST_MAX,
    BYTES_MIN,
    FAILED_SECONDS,
    LACKING_SECONDS,
    PATIENCE,
    PEERS_MAX,
    Seen,
    in_order,
    is_slow,
    moves,
    rarest_first,
    rival,
    wait_seconds_max,
)
from spes_protocols.codec import sha256
from spes_protocols.requests import SHARE_WHOLE

RATES = {"ada": 100.0, "bob": 900.0, "eve": 1000.0, "dan": 1100.0}


def test_the_author_is_asked_first_and_then_the_fastest() -> None:
    others = ["ada", "eve", "new", "dan", "bob"]
    assert in_order("bob", others, RATES) == ["bob", "dan", "eve", "new", "ada"]
    assert in_order("bob", others, {}) == ["bob", "ada", "eve", "new", "dan"]
    assert in_order("bob", others, RATES, {"dan"}) == ["bob", "eve", "new", "ada", "dan"]
    assert in_order("bob", [], RATES) == ["bob"]
    assert in_order("ada", others, RATES, {"dan"}, {"new", "dan"}) == ["new", "eve", "bob", "ada", "dan"]


def test_a_slow_failed_or_absent_author_is_asked_after_some_others() -> None:
    others = ["ada", "eve", "dan", "bob"]
    assert in_order("ada", others, RATES) == ["dan", "eve", "bob", "ada"]
    assert in_order("eve", others, RATES, {"eve", "bob"}) == ["dan", "ada", "eve", "bob"]
    assert in_order("eve", ["ada", "dan"], RATES) == ["dan", "ada", "eve"]
    many = [f"peer-{number}" for number in range(20)]
    assert in_order("ada", ["ada", *many], RATES).index("ada") == ASKED_FIRST_MAX


def test_slow_is_less_than_half_of_the_others_median() -> None:
    assert is_slow("ada", RATES)
    assert not is_slow("bob", RATES)
    assert not is_slow("new", RATES)
    assert not is_slow("ada", {"ada": 1.0})
    assert not is_slow("ada", {"ada": 50.0, "bob": 100.0})


def test_a_rival_is_much_faster_or_the_holder_has_stopped() -> None:
    others = ["ada", "bob", "eve", "new"]
    assert rival("ada", 100.0, others, RATES, set()) == "eve"
    assert rival("ada", 100.0, others, RATES, {"eve"}) == "bob"
    assert rival("ada", 100.0, others, RATES, set(), {"eve": 1}) == "bob"
    assert rival("ada", 100.0, others, RATES, set(), {"eve": 1, "bob": 1}) == "eve"
    assert rival("ada", 0.0, ["ada", "new", "newer"], RATES, set(), {"new": 1}) == "newer"
    assert rival("ada", 600.0, others, RATES, set()) is None
    assert rival("ada", 0.0, ["ada", "new"], RATES, set()) == "new"
    assert rival("ada", 1.0, ["ada", "new"], RATES, set()) is None
    assert rival("ada", 0.0, ["ada", "new"], RATES, {"new"}) is None


def test_the_rarest_come_first_and_each_fetcher_begins_elsewhere() -> None:
    blobs = [bytes([number]) * 32 for number in range(6)]
    fetchers = ["ada", "bob", "eve"]
    firsts = [rarest_first(blobs, {}, me, fetchers)[0] for me in fetchers]
    assert firsts == [blobs[0], blobs[2], blobs[4]]
    assert sorted(rarest_first(blobs, {}, "bob", fetchers)) == blobs
    held = dict.fromkeys(blobs, 2) | {blobs[5]: 1}
    assert [rarest_first(blobs, held, me, fetchers)[0] for me in fetchers] == [blobs[5]] * 3
    assert rarest_first(blobs[:1], {}, "new", fetchers) == blobs[:1]
    assert rarest_first([], {}, "ada", []) == []


def test_what_was_seen_fades_and_is_bounded() -> None:
    now = 0.0
    seen = Seen(lambda: now)
    blob, other = b"b" * 32, b"o" * 32
    seen.came("ada", BYTES_MIN - 1, 0.001)
    assert seen.rates == {}
    seen.came("ada", 1_000_000, 10.0)
    assert seen.rates == {"ada": 100_000.0}
    seen.came("ada", 200_000, 0.1)
    assert 100_000 < seen.rates["ada"] < 150_000, "one burst does not make a line fast"
    for _ in range(20):
        seen.came("ada", 200_000, 0.1)
    assert seen.rates["ada"] > 1_500_000
    seen.failed("ada")
    seen.lacks("bob", blob)
    assert (seen.last(blob), seen.last(other)) == ({"ada", "bob"}, {"ada"})
    now = LACKING_SECONDS
    assert seen.last(blob) == {"ada"}
    now = FAILED_SECONDS
    assert seen.last(blob) == set()
    seen.failed("ada")
    seen.came("ada", 100_000, 1.0)
    assert seen.last(blob) == set(), "it gives again"
    for number in range(2 * PEERS_MAX):
        seen.came(str(number), BYTES_MIN, 1.0)
        seen.failed(str(number))
        seen.lacks(str(number), blob)
    assert len(seen.rates) == len(seen.last(blob)) == PEERS_MAX


A, B, C = (bytes([number]) * 32 for number in range(3))
ORDER = [A, B, C]
FIRST, SECOND = sorted(("ada", "bob"), key=lambda peer: sha256(A + peer.encode()))


def told(**shares: dict[str, int]) -> dict[bytes, dict[str, int]]:
    return {blob: shares.get(name, {}) for name, blob in zip("ABC", ORDER, strict=True)}


def test_what_nobody_has_is_fetched_from_the_slow_author_one_by_one_and_the_rest_from_who_has_it() -> None:
    own = dict.fromkeys(ORDER, 1)
    assert moves(ORDER, {}, told(), "me", own, ()) == ([], [], [A])
    assert moves(ORDER, {A: True}, told(), "me", own, ()) == ([], [], [])
    assert moves(ORDER, {A: True, B: True}, told(), "me", own, ()) == ([B], [], []), "it was not known to be slow"
    assert moves(ORDER, {A: True}, told(B={"ada": SHARE_WHOLE}), "me", own, ()) == ([], [B], [])
    assert moves(ORDER, {A: True}, told(A={"ada": SHARE_WHOLE}), "me", own, ()) == ([A], [A], [B])
    assert moves(ORDER, {A: False}, told(A={"ada": SHARE_WHOLE}), "me", own, ()) == ([], [], [B])


def test_what_another_fetches_is_left_to_it_for_a_while() -> None:
    own = dict.fromkeys(ORDER, 1)
    everything = told(A={"ada": 1}, B={"ada": 1}, C={"bob": 9})
    assert moves(ORDER, {}, everything, "me", own, ()) == ([], [], [])
    assert moves(ORDER, {}, everything, "me", own, {B}) == ([], [], [B])
    assert moves(ORDER, {}, told(A={"ada": 1}, C={"bob": 9}), "me", own, ()) == ([], [], [B])
    assert moves(ORDER, {B: True}, told(B={"ada": 2 + AHEAD}), "me", own, {B}) == ([], [], [])


def test_of_two_that_fetch_the_same_one_goes_on() -> None:
    for mine in (1, 1 + AHEAD):
        own = dict.fromkeys(ORDER, mine)
        assert moves([A], {A: True}, {A: {SECOND: 1}}, FIRST, own, ()) == ([], [], [])
        assert moves([A], {A: True}, {A: {FIRST: 1}}, SECOND, own, ()) == ([A], [], [])
    own = dict.fromkeys(ORDER, 50)
    ahead, behind = {A: {SECOND: 51 + AHEAD}}, {A: {FIRST: 49 - AHEAD}}
    assert moves([A], {A: True}, ahead, FIRST, own, ()) == ([A], [], [])
    assert moves([A], {A: True}, behind, SECOND, own, ()) == ([], [], [])
    assert moves([A], {}, behind, SECOND, own, ()) == ([], [], [A]), "most of it is here from before"


def test_for_another_one_waits_as_long_as_the_author_would_take_twice_and_half_of_what_is_left() -> None:
    assert wait_seconds_max(1000, 100.0, 1000.0) == PATIENCE * 10.0
    assert wait_seconds_max(1000, 100.0, 30.0) == 15.0
    assert wait_seconds_max(1000, 0.0, 30.0) == 15.0


def test_a_pace_counts_until_something_is_measured_and_a_word_as_long_as_nothing_else_is_said() -> None:
    seen = Seen(lambda: 0.0)
    seen.looked("ada", 0.0)
    seen.looked("ada", 100.0)
    assert 0 < seen.rates["ada"] < 100
    seen.came("ada", BYTES_MIN, 1.0)
    seen.looked("ada", 1.0)
    assert seen.rates["ada"] == BYTES_MIN
    seen.said("bob", A, holds=False)
    assert seen.last(A) == {"bob"}
    seen.said("bob", A, holds=True)
    assert seen.last(A) == set()
    for number in range(3 * PEERS_MAX):
        seen.looked(str(number), 1.0)
    assert len(seen.rates) <= 2 * PEERS_MAX
