"""What a peer remembers of its network across restarts: its own port, and where others were (SPEC 3.2).

With it a volunteer finds the run again when the address it once pasted is gone, and all find each other when all were
restarted. Only a hint: whoever answers there is checked like anyone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.net.addresses import check_listen, parse_address
from spes_p2p.store.files import atomic_write
from spes_protocols.errors import UserError

NETWORK = "network"
"""The file's name in a home."""

ADDRESSES_MAX = 64
_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """`port` this peer listened on, 0 if unknown; `peers`: multiaddrs of others."""

    port: int = 0
    peers: tuple[str, ...] = ()


def recall(path: Path) -> Remembered:
    """What the file holds; what is missing or damaged is forgotten."""
    port, peers = 0, []
    with contextlib.suppress(OSError, UnicodeDecodeError), path.open("rb") as file:
        for line in file.read(_BYTES_MAX).decode("ascii").splitlines():
            kind, _, value = line.partition(" ")
            with contextlib.suppress(UserError):
                if kind == "listen":
                    port = check_listen(value)[1]
                elif kind == "peer":
                    parse_address(value)
                    peers.append(value)
    return Remembered(port=port, peers=tuple(peers[:ADDRESSES_MAX]))


def remember(path: Path, remembered: Remembered) -> None:
    """Replace the file, if that changes anything. Raises `UserError` if the disk does not take it."""
    if remembered != recall(path):
        lines = [f"listen /ip4/0.0.0.0/tcp/{remembered.port}", *(f"peer {peer}" for peer in remembered.peers)]
        atomic_write(path, "".join(f"{line}\n" for line in lines).encode("ascii"))


def with_port(listen: Sequence[str], port: int) -> tuple[str, ...]:
    """The addresses to listen on, with `port` in place of "any"; several are left as they are."""
    if len(listen) == 1 and port and not check_listen(listen[0])[1]:
        return (listen[0].rpartition("/")[0] + f"/{port}",)
    return tuple(listen)
