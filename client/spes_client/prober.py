"""The prober of `spes doctor`: py-libp2p in an environment and a process of its own, as a second opinion.

    install --pip--> cache directory/spes-p2p/prober        Prober --lines of JSON--> prober_dial, run by that Python

What it says is taken like a stranger's word: bounded, checked, and late answers count as none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_client import ui
from spes_p2p.net.launch import launch
from spes_protocols.errors import UserError

REQUIREMENT = "libp2p==0.8.1"
_PINS = """
    aioquic==1.7.2 anyio==4.16.0 async-generator==1.10 attrs==26.1.0 base58==2.1.1 blake3==1.0.11 cbor2==6.3.0
    certifi==2026.10.19.post1 cffi==2.1.1 charset-normalizer==3.5.3 coincurve==21.0.0 cryptography==50.0.2
    dnspython==2.9.2 fastecdsa==2.3.2 grpcio==1.85.3 h11==0.16.0 httpcore==1.0.9 httpx==0.28.1 idna==3.20
    ifaddr==0.2.0 importlib_metadata==10.2.0 lazy-importer==0.1.0 lru-dict==1.4.1 miniupnpc==2.3.3 mmh3==5.3.1
    morphys==1.0 multiaddr==0.2.0 mypy-protobuf==5.1.0 mypy_extensions==1.2.0 netaddr==1.3.0
    noiseprotocol==0.3.1 outcome==1.3.0.post0 packaging==26.4 prometheus_client==0.26.0 protobuf==6.33.6
    psutil==7.2.2 py-cid==0.5.0 py-multibase==2.0.0 py-multicodec==1.0.0 py-multihash==3.0.0 pycparser==3.12
    pycryptodome==4.4.0 pylsqpack==1.0.0 PyNaCl==1.6.2 pyOpenSSL==26.4.0 python-baseconv==1.2.2
    requests==2.34.2 rpcudp==5.0.1 service-identity==26.1.0 six==1.17.0 sniffio==1.3.1 sortedcontainers==2.4.0
    trio==0.35.0 trio-typing==0.10.0 trio-websocket==0.12.2 types-protobuf==7.35.1.20260906
    types-requests==2.33.0.20261030 typing_extensions==4.16.0 u-msgpack-python==2.8.0 urllib3==2.8.0
    varint==1.0.2 wsproto==1.3.2 zeroconf==0.150.5 zipp==4.1.2
"""
"""What it was tried with; of these only what it needs is installed."""

INSTALL_SECONDS = 900.0
START_SECONDS = 10.0
_GRACE_SECONDS = 2.0
_LINE_BYTES_MAX = 32 * 1024
_TEXTS_MAX = 32
_TEXT_MAX = 200


@dataclass(frozen=True, kw_only=True)
class Dialled:
    """What came of one address. `seconds` until the connection was up, None without one; `problem`: what went wrong.

    `protocols` the peer speaks; it saw this machine at `observed`, whose own port was `local_port`.
    """

    seconds: float | None = None
    problem: str = ""
    protocols: tuple[str, ...] = ()
    observed: str = ""
    local_port: int = 0


def directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the environment is, for all homes of this account."""
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "spes-p2p" / "prober"


def python() -> Path | None:
    """The Python of the environment, None where it is not installed."""
    path = directory() / "bin" / "python"
    return path if path.exists() else None


def install() -> Path:
    """Make the environment anew; returns its place. Raises `UserError`. What was there stays until all is there."""
    place = directory()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="prober-", dir=place.parent) as name:
            fresh = Path(name) / "prober"
            pins = Path(name) / "pins"
            pins.write_text("\n".join(_PINS.split()) + "\n", "utf-8")
            _run(sys.executable, "-I", "-m", "venv", str(fresh))
            pip = (str(fresh / "bin" / "python"), "-I", "-m", "pip", "--quiet", "--disable-pip-version-check")
            _run(*pip, "install", "--constraint", str(pins), REQUIREMENT)
            shutil.rmtree(place, ignore_errors=True)
            fresh.rename(place)
    except OSError as error:
        raise UserError(f"cannot install the prober at {place}: {error.strerror or error}") from None
    return place


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=INSTALL_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"the prober was not installed within {INSTALL_SECONDS:.0f} s; try again later") from None
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()[-1:]
        reason = ui.one_line(words[0])[:300] if words else "no reason was given"
        raise UserError(f"the prober cannot be installed: {reason}")


class Prober:
    """A running prober: asked side by side, ended with the block of `started`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.version = ""
        self._process = process
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._asked = 0
        self._ended = ""

    async def dial(self, address: str, seconds: float) -> Dialled:
        """Connect to a multiaddr and ask who is there, for at most `seconds`."""
        self._asked += 1
        number = self._asked
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        question = json.dumps({"id": number, "address": address, "seconds": seconds})
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(seconds + _GRACE_SECONDS):
                if self._ended:
                    return Dialled(problem=self._ended)
                self._process.stdin.write(question.encode() + b"\n")
                await self._process.stdin.drain()
                return dialled(await answer)
        except TimeoutError:
            return Dialled(problem=f"no answer within {seconds:.0f} s")
        except OSError:
            return Dialled(problem=self._ended or "it has ended")
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        """Answers to those who wait for them, until the end."""
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                told = _object(line)
                number = told.get("id")
                answer = self._waiting.get(number) if isinstance(number, int) else None
                if answer is not None and not answer.done():
                    answer.set_result(told)
            self._ended = "it has ended"
        except ValueError as error:
            self._ended = f"it talks nonsense: {error}"
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result({"error": self._ended})

    async def _until_ready(self) -> None:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                told = _object(await self._process.stdout.readline())
        except TimeoutError:
            raise UserError(f"it did not start within {START_SECONDS:.0f} s") from None
        except ValueError:
            raise UserError("it does not start: the environment is damaged, or of another version of Python") from None
        self.version = _text(told.get("version"))


@contextlib.asynccontextmanager
async def started(interpreter: Path) -> AsyncIterator[Prober]:
    """Run the prober while the context lasts. Raises `UserError` if it does not start."""
    script = Path(__file__).with_name("prober_dial.py")
    try:
        process = await asyncio.create_subprocess_exec(
            *launch([str(interpreter), "-I", str(script)]), stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, limit=_LINE_BYTES_MAX,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"it does not start: {error.strerror or error}") from None
    reading: asyncio.Task[None] | None = None
    try:
        prober = Prober(process)
        await prober._until_ready()
        reading = asyncio.create_task(prober._read())
        yield prober
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        try:
            await process.wait()
        finally:  # also where that is cut short: else its pipes complain when the loop is gone
            process._transport.close()  # type: ignore[attr-defined]


def dialled(told: Mapping[str, Any]) -> Dialled:
    """An answer, checked field by field: what is not of its kind counts as not told."""
    seconds, port = told.get("seconds"), told.get("local_port")
    protocols = told.get("protocols")
    return Dialled(
        seconds=float(seconds) if isinstance(seconds, int | float) and 0 <= seconds < 1e6 else None,
        problem=_text(told.get("error")),
        protocols=tuple(map(_text, protocols[:_TEXTS_MAX])) if isinstance(protocols, list) else (),
        observed=_text(told.get("observed")),
        local_port=port if isinstance(port, int) and 0 < port < 65536 else 0,
    )


def _object(line: bytes) -> dict[str, Any]:
    """One line of JSON. Raises `ValueError`."""
    try:
        told = json.loads(line)
    except RecursionError:
        told = None
    if not isinstance(told, dict):
        raise ValueError("a line that is no answer")
    return told


def _text(value: object) -> str:
    return ui.one_line(value)[:_TEXT_MAX] if isinstance(value, str) else ""
