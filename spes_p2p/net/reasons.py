"""Why a peer could not be reached: the daemon's words, as what a person can do about it.

libp2p tries a peer that could not be reached again only after some seconds, and until then says nothing but that; so
the last reason is kept.
"""

from __future__ import annotations

BACKOFF = "it could not be reached a moment ago; it is tried again in a few seconds"
PEERS_MAX = 1024


def reason(daemon_message: str) -> str:
    """What a person can do about a failed connection, from the daemon's words."""
    text = daemon_message.lower()
    if "peer id mismatch" in text:
        return "another peer answers at that address; ask for the current one"
    if "resource_limit_exceeded" in text:
        return "its relay has no more room for one of us: as many relayed connections as a peer may have there are open"
    if "no_reservation" in text:
        return "it has no place at its relay (NO_RESERVATION); it takes one again by itself when it is there"
    if "connection refused" in text:
        return "connection refused; check that the peer is running and the port is right"
    if "no route to host" in text or "network is unreachable" in text:
        return "no route to it; check this machine's network and the address"
    if "took longer" in text or "i/o timeout" in text or "deadline exceeded" in text:
        return "no answer; check the address, the peer's firewall and this machine's network"
    if "no such host" in text or "no good addresses" in text:
        return "its address leads nowhere; check the host name, or give a current address"
    if "no addresses" in text or "routing: not found" in text:
        return "no address of it is known here"
    if "negotiate security protocol" in text:
        return "what answers there is not a peer; check the port"
    if "dial backoff" in text:
        return BACKOFF
    return daemon_message


class Reasons:
    """The last reason of each peer that could not be reached."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def note(self, peer: str, daemon_message: str) -> str:
        """The reason for people; while it is too soon for another try, the one before."""
        found = reason(daemon_message)
        if found == BACKOFF:
            return self._last.get(peer, BACKOFF)
        self._last.pop(peer, None)
        self._last[peer] = found
        while len(self._last) > PEERS_MAX:
            del self._last[next(iter(self._last))]
        return found
