"""The worker process of a peer: checks blobs and applies rounds, away from the event loop (SPEC 6.5, 12).

    peer  --job (4-byte length, msgpack)-->  python -m spes_p2p.peer.worker RUN_DIR  --result-->  peer

Only arrays in files and small records cross. The process ends when its standard input does, so none outlives its peer.
`Worker` is the peer's side, `main` the process's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from spes_p2p.core.ladder import Verdict
from spes_p2p.core.roots import state_root
from spes_p2p.delta.contributions import Contribution, apply_set, check_blobs
from spes_p2p.delta.genesis import genesis_tensors
from spes_p2p.store.rundir import RunDir
from spes_protocols.codec import Size, decode, encode
from spes_protocols.errors import SpesError, UserError
from spes_protocols.messages import Section
from spes_protocols.types import PEERS_MAX, Count, DigestOrNil, PeerId

JOB_SECONDS_MAX = 3600.0
"""Far more than applying a round of the largest model takes; only a worker that hangs is ended by it."""

JOB_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class CheckJob:
    """Decode a contribution's blobs."""

    peer: PeerId
    sections: tuple[Section, ...]


@dataclass(frozen=True, kw_only=True)
class ApplyJob:
    """Write S_{round + 1} from S_round; `round` -1 writes S_0."""

    round: int
    step: Count
    counted: Annotated[tuple[Contribution, ...], Size(0, PEERS_MAX)]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One of the two."""

    check: CheckJob | None = None
    apply: ApplyJob | None = None


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A section's squared norm."""

    section: str
    squared: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the job gave: a failed check's name or norms, or a state root; or an error for the person at the machine."""

    check: str = ""
    norms: tuple[Norm, ...] = ()
    root: DigestOrNil = b""
    error: str = ""


class Worker:
    """Runs one job at a time in the worker process, which it starts, and starts again once if it dies."""

    def __init__(self, run_dir: RunDir, threads: int, log: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._threads = threads
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._job: asyncio.Task[Result] | None = None
        self._closed = False

    async def check(self, peer: str, sections: tuple[Section, ...]) -> Verdict:
        """Verdict on a contribution whose blobs are in the store. Raises `UserError` if the worker fails."""
        result = await self._run(Job(check=CheckJob(peer=peer, sections=sections)))
        return Verdict(result.check or None, tuple((n.section, n.squared) for n in result.norms))

    async def apply(self, round_number: int, step: int, counted: tuple[Contribution, ...]) -> bytes:
        """Write S_{round + 1}; returns its root. Raises `UserError` (a full disk, say)."""
        return (await self._run(Job(apply=ApplyJob(round=round_number, step=step, counted=counted)))).root

    async def genesis(self) -> bytes:
        """Write S_0; returns its root."""
        return (await self._run(Job(apply=ApplyJob(round=-1, step=0, counted=())))).root

    async def close(self) -> None:
        """End the process, whatever it is doing; it takes no more jobs."""
        self._closed = True
        if self._job is not None:
            self._job.cancel()
            await asyncio.gather(self._job, return_exceptions=True)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def idle(self) -> None:
        """Wait until no job is under way: what a cancelled job still writes is written after this."""
        async with self._lock:
            pass

    async def _run(self, job: Job) -> Result:
        await self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise UserError("this peer is ending")
        # A job that has begun is carried through even if nobody waits for it any more: half an answer would be taken
        # for the next job's.
        self._job = asyncio.create_task(self._exchange_twice(encode(job)))
        self._job.add_done_callback(lambda _: self._lock.release())
        result = await asyncio.shield(self._job)
        if result.error:
            raise UserError(result.error)
        return result

    async def _exchange_twice(self, job: bytes) -> Result:
        try:
            return await self._within_limit(job)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._log("the apply worker died; starting it again")
            assert self._process is not None
            await self._process.wait()
        try:
            return await self._within_limit(job)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise UserError("the apply worker died twice in a row; is there enough memory?") from None

    async def _within_limit(self, job: bytes) -> Result:
        try:
            async with asyncio.timeout(JOB_SECONDS_MAX):
                return await self._exchange(job)
        except TimeoutError:
            assert self._process is not None
            self._process.kill()  # its late answer would be taken for the next job's
            await self._process.wait()
            raise UserError(f"the apply worker gave no answer for {JOB_SECONDS_MAX:.0f} s and was ended") from None

    async def _exchange(self, job: bytes) -> Result:
        process = self._process
        if process is None or process.returncode is not None:
            command = [sys.executable, "-m", "spes_p2p.peer.worker", str(self._run_dir.path), str(self._threads)]
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
            )
            self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(len(job).to_bytes(4, "big") + job)
        await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(4), "big")
        return decode(Result, await process.stdout.readexactly(size), bytes_max=JOB_BYTES_MAX)


def _do(run_dir: RunDir, job: Job, threads: int) -> Result:
    manifest, blobs = run_dir.manifest.record, run_dir.blobs()
    if job.check is not None:
        verdict = check_blobs(manifest, job.check.peer, job.check.sections, blobs.path)
        norms = tuple(Norm(section=name, squared=squared) for name, squared in verdict.norms)
        return Result(check=verdict.check or "", norms=norms)
    assert job.apply is not None
    states, task = run_dir.states(), job.apply
    with states.writer(task.round + 1) as writer:
        if task.round < 0:
            for name, array in genesis_tensors(manifest.model, manifest.ownership.groups, manifest.seed):
                writer.add(name, array)
        else:
            state = states.read(task.round)
            apply_set(
                manifest, task.step, task.counted, state, blob_path=blobs.path, write=writer.add, threads=threads
            )  # fmt: skip
        return Result(root=state_root(writer.commit()))


def answer(run_dir: RunDir, job: Job, threads: int) -> Result:
    """Do a job; what goes wrong is in the result."""
    try:
        return _do(run_dir, job, threads)
    except UserError as error:
        return Result(error=str(error))
    except (SpesError, OSError, MemoryError) as error:
        return Result(error=f"{type(error).__name__}: {error}"[:500])


def _read(stream: BinaryIO) -> bytes | None:
    size = stream.read(4)
    return stream.read(int.from_bytes(size, "big")) if len(size) == 4 else None


def main(arguments: list[str]) -> int:
    """Answer jobs from standard input until it ends."""
    run_dir, threads = RunDir.open(Path(arguments[0])), int(arguments[1])
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not print into the answers
    while (data := _read(source)) is not None:
        job = decode(Job, data, bytes_max=JOB_BYTES_MAX)
        result = encode(answer(run_dir, job, threads))
        sink.write(len(result).to_bytes(4, "big") + result)
        sink.flush()
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
