"""A peer whose clock is two minutes slow: joins, prints its correction and what it found, publishes, waits for EOF."""

import asyncio
import sys
import time
from pathlib import Path

_true = time.time
time.time = lambda: _true() - 120

# After the clock was set back, because hivemind keeps a reference to it.
from spes_p2p.crypto.keys import Identity  # noqa: E402
from spes_p2p.net.directory import Directory  # noqa: E402
from spes_p2p.net.libp2p import LibP2P  # noqa: E402


async def main(path: Path, peer: str, key: str) -> None:
    identity = Identity.generate()
    identity.save(path)
    transport = await LibP2P.create(
        identity_path=path, peer_id=identity.peer_id, listen=["/ip4/127.0.0.1/tcp/0"], peers=[peer]
    )
    directory = await Directory.create(transport, identity, [peer])
    found = await directory.lookup(key)
    await directory.publish(key, b"from a slow clock", 30)
    print(directory.clock_offset_seconds, b" ".join(found).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await directory.close()
    await transport.close()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
