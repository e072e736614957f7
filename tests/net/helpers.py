"""Real transports on loopback for the tests of `spes_p2p.net`, closed whatever the test does."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spes_p2p.crypto.keys import Identity
from spes_p2p.net.directory import Directory
from spes_p2p.net.libp2p import LibP2P

T = TypeVar("T")

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
SECONDS_MAX = 60.0
_POLL_SECONDS = 0.02


@dataclass(kw_only=True)
class Node:
    """One peer of a test: its key, its daemon, and its directory if it has one."""

    identity: Identity
    identity_path: Path
    transport: LibP2P
    directory: Directory | None = None

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def dht(self) -> Directory:
        assert self.directory is not None
        return self.directory

    async def address(self) -> str:
        return (await self.transport.addresses())[0]

    async def close(self) -> None:
        if self.directory is not None:
            await self.directory.close()
        await self.transport.close()


class Net:
    """Makes nodes, and closes them in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []

    async def node(
        self,
        peers: Sequence[str] = (),
        *,
        directory: bool = False,
        client_mode: bool = False,
        listen: Sequence[str] = (LOOPBACK,),
        number: int | None = None,
        **options: object,
    ) -> Node:
        """A node connected to `peers`, with a key of its own, or that of an earlier `number`."""
        number = len(self.nodes) if number is None else number
        identity = Identity.from_seed(bytes([number + 1]) * 32)
        path = self.folder / f"identity-{number}"
        if not path.exists():
            identity.save(path)
        transport = await LibP2P.create(
            identity_path=path,
            peer_id=identity.peer_id,
            listen=listen,
            peers=peers,
            log_path=self.folder / f"log-{number}",
            **options,  # type: ignore[arg-type]
        )
        node = Node(identity=identity, identity_path=path, transport=transport)
        self.nodes.append(node)
        if directory:
            node.directory = await Directory.create(transport, identity, peers, client_mode=client_mode)
        return node

    async def pair(self) -> tuple[Node, Node]:
        """Two connected nodes without directories."""
        first = await self.node()
        return first, await self.node([await first.address()])

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in self.nodes))


class Everybody:
    """Contacts of one node: the other nodes."""

    def __init__(self, net: Net, node: Node) -> None:
        self._net = net
        self._node = node

    def volunteers(self) -> list[str]:
        """All of them."""
        return [node.peer_id for node in self._net.nodes if node is not self._node]


def net_test(test: Callable[[Net], Awaitable[None]]) -> Callable[[Path], None]:
    """A coroutine over a `Net` as a test function, with a deadline over all of it."""

    async def whole(folder: Path) -> None:
        net = Net(folder)
        try:
            async with asyncio.timeout(SECONDS_MAX):
                await test(net)
        finally:
            await net.close()

    def run(tmp_path: Path) -> None:
        asyncio.run(whole(tmp_path))

    run.__name__ = run.__qualname__ = test.__name__  # type: ignore[attr-defined]
    return run


@dataclass(kw_only=True)
class Standing:
    """Nodes that serve all tests of a module in turn, as starting a daemon takes half a second of CPU time."""

    runner: asyncio.Runner
    nodes: Sequence[Node]


@contextmanager
def stand(folder: Path, setup: Callable[[Net], Awaitable[Sequence[Node]]]) -> Iterator[Standing]:
    """Nodes made by `setup`, on an event loop that the tests share."""
    net = Net(folder)
    with asyncio.Runner() as runner:
        try:
            yield Standing(runner=runner, nodes=runner.run(_awaited(setup(net))))
        finally:
            runner.run(net.close())


def standing_test(test: Callable[..., Awaitable[None]]) -> Callable[[Standing], None]:
    """A coroutine over the module's nodes as a test function that uses the fixture `standing`."""

    def run(standing: Standing) -> None:
        standing.runner.run(_awaited(test(*standing.nodes)))

    run.__name__ = run.__qualname__ = test.__name__  # type: ignore[attr-defined]
    return run


async def _awaited(work: Awaitable[T]) -> T:
    async with asyncio.timeout(SECONDS_MAX):
        return await work


async def until(holds: Callable[[], object], seconds: float = 15.0) -> None:
    """Return when `holds()` is true (a plain value or something to await); fail after `seconds`."""
    never = asyncio.Event()
    deadline = time.monotonic() + seconds
    while True:
        value = holds()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.wait([asyncio.ensure_future(never.wait())], timeout=_POLL_SECONDS)
