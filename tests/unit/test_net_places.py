"""Places between senders who ask for more than there are."""

from collections.abc import Callable

from spes_p2p.net.places import Place, Places


class Room:
    """Six places, four for each sender, and who lost one."""

    def __init__(self) -> None:
        self.places = Places()
        self.lost: list[str] = []

    def take(self, sender: str, *, is_favoured: bool = False, waits: bool = True) -> Place | None:
        place = self.places.take(sender, self._cut(sender), each_max=4, all_max=6, is_favoured=is_favoured)
        if place is not None:
            place.waits = waits
        return place

    def _cut(self, sender: str) -> Callable[[], None]:
        return lambda: self.lost.append(sender)


def test_one_sender_has_so_many_and_gives_back_what_it_has() -> None:
    room = Room()
    first, *others = [room.take("a") for _ in range(5)]
    assert first is not None
    assert others[-1] is None
    room.places.give_back(first)
    room.places.give_back(first)  # once is enough
    assert room.places.of("a") == len(room.places) == 3
    assert room.take("a") is not None
    assert room.lost == []


def test_a_newcomer_gets_an_idle_place_of_who_has_most() -> None:
    room = Room()
    for sender in "aaaabb":
        room.take(sender, waits=sender == "a")
    assert room.take("c") is not None
    assert room.take("d") is not None
    assert room.lost == ["a", "a"]
    assert [room.places.of(sender) for sender in "abcd"] == [2, 2, 1, 1]
    assert room.places.cuts == 2


def test_busy_places_go_only_to_who_has_two_less() -> None:
    room = Room()
    for sender in "aaabbb":
        room.take(sender, waits=False)
    assert room.take("a") is None
    assert room.take("c", waits=False) is not None  # of two with as many, the one who has held its place for longest
    assert room.take("c", waits=False) is not None
    assert room.take("c", waits=False) is None
    assert room.lost == ["a", "b"]


def test_many_names_with_one_idle_place_each_keep_nobody_out() -> None:
    room = Room()
    for sender in "abcdef":
        room.take(sender)
    place = room.take("honest")
    assert place is not None
    place.waits = False
    for sender in "ghijkl":
        room.take(sender)
    assert "honest" not in room.lost
    assert room.lost == list("abcdefg")


def test_strangers_cannot_take_what_favoured_senders_hold() -> None:
    room = Room()
    for sender in "aaabbb":
        room.take(sender, is_favoured=True)
    assert room.take("c") is None
    assert room.take("d", is_favoured=True) is not None
    assert room.lost == ["a"]
