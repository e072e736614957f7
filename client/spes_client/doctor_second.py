"""The second opinion of `spes doctor`: the same addresses dialled by another implementation of libp2p (`prober`)."""

from __future__ import annotations

import asyncio

from spes_client import prober
from spes_client.doctor_findings import DialFound, SecondFound
from spes_protocols.errors import UserError

DIALS_MAX = 16
"""Addresses that are dialled a second time; of more the rest are left out."""

DIAL_SECONDS = 6.0


class Second:
    """Asks the prober as soon as it has started, if there is one; `hold` keeps it."""

    def __init__(self, found: SecondFound) -> None:
        self._found = found
        self._ready: asyncio.Future[prober.Prober | None] = asyncio.get_running_loop().create_future()
        self._dialled: set[str] = set()

    async def hold(self) -> None:
        """Run the prober until cancelled. Why there is none is noted."""
        interpreter = prober.python()
        self._found.is_installed = interpreter is not None
        try:
            if interpreter is not None:
                async with prober.started(interpreter) as running:
                    self._found.version = running.version
                    self._ready.set_result(running)
                    await asyncio.Event().wait()
        except UserError as error:
            self._found.problem = str(error)
        finally:
            if not self._ready.done():
                self._ready.set_result(None)

    async def dial(self, kind: str, text: str, address: str) -> None:
        """Dial a multiaddr and note what came of it under the text by which the rows know it; each only once."""
        if address in self._dialled or len(self._dialled) >= DIALS_MAX:
            return
        self._dialled.add(address)
        running = await asyncio.shield(self._ready)
        if running is None:
            return
        told = await running.dial(address, DIAL_SECONDS)
        fields = vars(told)
        self._found.dials.append(DialFound(kind=kind, text=text, **fields))
