"""That hivemind's modules come without torch, whole, and are hivemind's own."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json, sys
import spes_p2p.peer.program
from hivemind.dht.node import DHTNode
from hivemind.utils import MSGPackSerializer, SerializerBase, get_dht_time, get_logger
heavy = [name for name in ("torch", "hivemind.averaging", "hivemind.optim", "hivemind.moe") if name in sys.modules]
print(json.dumps([heavy, DHTNode.__module__, MSGPackSerializer.loads(MSGPackSerializer.dumps([1, "a"]))]))
"""


def test_a_peer_is_imported_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], "hivemind.dht.node", [1, "a"]]
