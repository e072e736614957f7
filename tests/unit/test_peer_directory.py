"""Joining the DHT while the network daemon comes and goes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spes_p2p.peer import peer as module
from spes_p2p.peer.peer import DIRECTORY_TRIES, Peer
from spes_protocols.errors import NetworkError


def join(monkeypatch: pytest.MonkeyPatch, failures: int) -> tuple[SimpleNamespace, list[list[str]]]:
    """A peer that joins through one other, and whom it tried to join through each time."""
    tried: list[list[str]] = []
    served: list[bool] = []

    async def serve(serves: bool) -> None:
        served.append(serves)

    async def create(transport: object, identity: object, peers: list[str], *, client_mode: bool) -> SimpleNamespace:
        assert client_mode
        tried.append(list(peers))
        if len(tried) <= failures:
            raise NetworkError("the network daemon does not answer the directory")
        return SimpleNamespace(clock_offset_seconds=0.0, serve=serve)

    monkeypatch.setattr(module.Directory, "create", create)
    peer = SimpleNamespace(
        transport=None, identity=None, contacts=SimpleNamespace(directory=None), note=lambda line: None,
        run_dir=SimpleNamespace(run_id=b""), _serves=False,
    )  # fmt: skip
    asyncio.run(Peer._join_directory(cast(Any, peer), ["other"]))
    assert served == [False]
    return peer, tried


def test_a_daemon_that_ends_meanwhile_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, tried = join(monkeypatch, failures=3)
    assert peer._directory.clock_offset_seconds == 0.0 and peer.contacts.directory is not None
    assert tried == [["other"], [], ["other"], []]  # through another, or found by others


def test_one_that_never_comes_ends_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NetworkError, match="does not answer the directory"):
        join(monkeypatch, failures=DIRECTORY_TRIES)
