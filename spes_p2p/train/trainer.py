"""The trainer process: takes rounds from the peer over the local socket, trains them, writes the coded deltas to files.

It knows nothing of the network. What it must remember lies in `state.py`'s file; killed at any instant, its successor
loses at most the local steps since the last round and never forgets what was published (SPEC 12.2).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from spes_p2p.core.peaks import known_peak, utilisation
from spes_p2p.core.plan import step_flops_per_token
from spes_p2p.core.tensors import tensor_specs
from spes_p2p.data.batches import TokenData
from spes_p2p.data.sources import StoppedError
from spes_p2p.delta.feedback import owned_start, taken_in
from spes_p2p.delta.numeric import FloatArray
from spes_p2p.model.moments import Moments
from spes_p2p.store.files import remove_unfinished
from spes_p2p.store.rundir import RunDir
from spes_p2p.store.states import map_state
from spes_p2p.train.ahead import Beside, Copied, Early, Trained, copied, expected_after, is_expected, question
from spes_p2p.train.contribution import Contribution, Weights, file_digest
from spes_p2p.train.followers import Followers
from spes_p2p.train.learner import kept_sections, plan_of, sections_of
from spes_p2p.train.link import Link
from spes_p2p.train.loop import RoundResult, StepReport
from spes_p2p.train.setup import EXIT_FAULT, EXIT_MEMORY, Options, check_devices, describe, make_learner
from spes_p2p.train.state import Computed, Pending, TrainerState, Whole, load_state, save_state
from spes_protocols import control_pb2 as pb
from spes_protocols.errors import DiskFullError, SpesError, UserError
from spes_protocols.messages import SHARED


def work(options: Options) -> int:
    """Serve the peer until it says stop or is gone. Returns the exit code; a fault of the program itself is raised."""
    link = Link(options.socket)
    followers: Followers | None = None
    try:
        check_devices(options, RunDir.open(options.run_dir).manifest.record)
        if options.devices > 1:
            followers = Followers(
                options.devices, options.socket.parent, lambda rank, code: _follower_ended(link, rank, code)
            )
            options = replace(options, meeting=followers.meeting)
        Trainer(options, link, followers).run()
    except StoppedError:
        return 0
    except Exception as error:
        if followers is not None:
            followers.yield_to_their_end()
        message, exit_code = describe(error)
        link.send(failed=pb.Failed(message=message))
        print(f"trainer: {message}", file=sys.stderr)
        if exit_code == EXIT_FAULT and not isinstance(error, SpesError):
            raise
        return exit_code
    finally:
        if followers is not None:
            followers.close()
        link.close()
    return 0


def _follower_ended(link: Link, rank: int, code: int) -> NoReturn:
    """End this process as its follower ended, from a thread: the main one may wait for the follower for ever."""
    reason = "out of memory" if code == EXIT_MEMORY else f"signal {-code}" if code < 0 else f"exit code {code}"
    message = f"the process of device {rank} ended: {reason}; its words are in trainer.log"
    link.send(failed=pb.Failed(message=message))
    print(f"trainer: {message}", file=sys.stderr, flush=True)
    link.close()
    os._exit(code if code > 0 else EXIT_FAULT)


class DataError(UserError):
    """The run's data cannot be read; the message says what and why in one line."""


class Trainer:
    """One run's model, optimiser state and data in this process."""

    def __init__(self, options: Options, link: Link, followers: Followers | None = None) -> None:
        self._options = options
        self._link = link
        self._followers = followers
        self._run = RunDir.open(options.run_dir)
        self._manifest = self._run.manifest.record
        model, groups = self._manifest.model, self._manifest.ownership.groups
        specs = tensor_specs(model, groups)
        self._shapes = {spec.name: spec.shape for spec in specs}
        self._sections = {spec.name: spec.section for spec in specs}
        self._state = load_state(self._run.optim_dir, self._shapes)
        self._early: Early | None = None
        self._clear_leftovers()
        self._learner = make_learner(options, self._manifest)
        self._state.moments = self._learner.parts(self._state.moments)
        device = self._learner.ranks.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        peak_flops = options.peak_flops or known_peak(name)
        self._peak_flops = peak_flops and options.devices * peak_flops
        self._device_name = f"{options.devices} x {name}" if options.devices > 1 else name
        with _reading_data():
            self._data = TokenData(
                self._manifest.data,
                model.sequence_length,
                self._manifest.seed,
                self._run.cache_dir,
                options.allow_sources,
                cache_bytes_max=options.cache_bytes_max,
                report=self._report_data,
            )

    def _clear_leftovers(self) -> None:
        """Remove what a killed trainer left half-done: all but the pending contribution's blobs."""
        remove_unfinished(self._run.optim_dir)
        pending = self._state.pending
        kept = {section.path for section in pending.done.sections} if pending else set()
        for path in self._run.out_dir.iterdir():
            if str(path) not in kept:
                path.unlink()

    def run(self) -> None:
        """Train the rounds that the peer asks for. Raises `StoppedError`, `DataError` and whatever else goes wrong."""
        pending = self._state.pending
        self._link.send(
            ready=pb.Ready(
                has_pending=pending is not None,
                pending_round=pending.task.round if pending else 0,
                pending_epoch=pending.task.epoch if pending else b"",
                pid=os.getpid(),
                device=self._device_name,
            )
        )
        with _reading_data():
            self._data.prepare()
        for task in self._link.inbox.tasks():
            if not Path(task.state_path).exists():
                self._link.send(skipped=pb.Skipped(round=task.round))  # the round is over, and its state removed
                continue
            if (known := self._finished_before(task)) is not None:
                self._link.send(round_done=known)
                continue
            trained: Trained | None = self._train(task)
            while trained is not None and trained.task.HasField("ahead") and self._followers is None:
                trained = self._publish_and_go_on(trained)
            if trained is not None:
                self._state = self._publish(trained, self._learner, self._state.moments, self._learner.whole)
                self._learner.finish()

    def _finished_before(self, task: pb.TrainRound) -> pb.RoundDone | None:
        """The answer to this very task, if an earlier trainer gave it and the files are still what it said."""
        pending = self._state.pending
        if pending is None:
            return None
        if question(task) != question(pending.task) or not all(map(_is_intact, pending.done.sections)):
            return None
        return pending.done

    def _train(self, task: pb.TrainRound) -> Trained:
        """One round's steps, from the outcome of the last contribution on; or those that were taken ahead."""
        early, self._early = self._early, None
        if early is not None and is_expected(early.expected, task):
            state = self._take_in(task, early.start)
            return Trained(task=task, state=state, result=early.result, seconds=early.seconds)
        self._settle(task)
        if self._followers is not None:
            self._followers.tell(task, forget=not self._state.moments)
        state = self._map(task)
        started = time.perf_counter()
        result, self._state.moments = self._local_steps(
            task, self._exact_weights(state), lambda: self._link.inbox.should_cut(task)
        )
        return Trained(task=task, state=state, result=result, seconds=time.perf_counter() - started)

    def _map(self, task: pb.TrainRound) -> Mapping[str, FloatArray]:
        return map_state(Path(task.state_path), list(self._shapes.items()))

    def _publish(
        self, trained: Trained, weights: Weights, moments: dict[str, Moments], whole: Whole | None = None
    ) -> TrainerState:
        """Code a round's contribution, write all down, tell the peer; returns the state as it then is on disk."""
        task, result, started = trained.task, trained.result, time.perf_counter()
        contribution = Contribution(task, trained.state, self._state.residuals, weights, self._manifest)
        files = [contribution.encode(section) for section in sections_of(task)]
        done = pb.RoundDone(
            round=task.round,
            epoch=task.epoch,
            sections=files,
            tokens=result.tokens,
            steps=result.steps,
            loss=result.loss,
            train_seconds=trained.seconds,
            encode_seconds=time.perf_counter() - started,
        )
        pending = Pending(task=task, done=done, counted=contribution.counted)
        state = TrainerState(moments=moments, residuals=contribution.missed, pending=pending)
        state = save_state(state, self._run.optim_dir, self._shapes, whole)
        self._link.send(round_done=done)
        return state

    def _publish_and_go_on(self, last: Trained) -> Trained | None:
        """Publish a round beside the steps of the next one (SPEC 6.9), from copies, for the steps change everything.

        Returns the next round if it was asked for meanwhile; else its steps wait for that (`_early`). They end early
        when another round is asked for.
        """
        own = set(sections_of(last.task))
        names = [name for name, section in self._sections.items() if section in own]
        start, moments = Copied({name: self._learner.trained(name) for name in names}), copied(self._state.moments)
        publishing = Beside(lambda: self._publish(last, start, moments))
        expected = expected_after(last.task)
        task: pb.TrainRound | None = None
        state = last.state

        def fits(asked: pb.TrainRound) -> bool:
            return is_expected(expected, asked) and Path(asked.state_path).exists()

        def should_cut() -> bool:
            nonlocal task, state
            if task is None and (task := self._link.inbox.take(fits)) is not None:
                self._go_on_from(publishing)
                state = self._take_in(task, start)
            if task is None:
                return self._link.inbox.is_asked or publishing.has_failed
            return self._link.inbox.should_cut(task)

        started = time.perf_counter()
        try:
            result, self._state.moments = self._local_steps(expected, None, should_cut)
        finally:
            if task is None:
                self._go_on_from(publishing)
        seconds = time.perf_counter() - started
        if task is None:
            self._early = Early(expected=expected, start=start, result=result, seconds=seconds)
            return None
        return Trained(task=task, state=state, result=result, seconds=seconds)

    def _go_on_from(self, publishing: Beside[TrainerState]) -> None:
        self._state = replace(publishing.wait(), moments=self._state.moments)

    def _take_in(self, task: pb.TrainRound, start: Copied) -> Mapping[str, FloatArray]:
        """Make the weights what they would be if the same steps had begun from S_r; returns S_r (SPEC 6.9)."""
        self._settle(task)
        state = self._map(task)
        exact = self._exact_weights(state)

        def value(name: str) -> FloatArray:
            if name not in start:
                return state[name]
            return taken_in(self._learner.trained(name), exact[name], start.trained(name))

        self._learner.load(Computed(state, value))
        return state

    def _settle(self, task: pb.TrainRound) -> None:
        """Apply the outcome of the last contribution; one the peer says nothing of was missed. Forget what is lost."""
        self._settle_pending(task)
        kept = kept_sections(task)
        self._state.keep({name for name, section in self._sections.items() if section in kept})

    def _settle_pending(self, task: pb.TrainRound) -> None:
        pending = self._state.pending
        if pending is None:
            return
        known = task.has_outcome and task.outcome_round == pending.task.round
        outcome = task.outcome if known else pb.MISSED
        if outcome == pb.ABANDONED:
            self._state.clear()
        else:
            self._state.settle(outcome, task.counted, self._sections.__getitem__)
        for section in pending.done.sections:
            Path(section.path).unlink(missing_ok=True)

    def _exact_weights(self, state: Mapping[str, FloatArray]) -> Mapping[str, FloatArray]:
        """Where the round starts: S_r, and W of the owned experts where it differs from that."""
        residuals = self._state.residuals
        different = {name for name in residuals if self._sections[name] != SHARED}
        return Computed(
            state, lambda name: owned_start(state[name], residuals[name]) if name in different else state[name]
        )

    def _local_steps(
        self, task: pb.TrainRound, start: Mapping[str, FloatArray] | None, should_cut: Callable[[], bool]
    ) -> tuple[RoundResult, dict[str, Moments]]:
        plan = plan_of(task)

        def sequences(positions: range) -> np.ndarray:
            with _reading_data():
                return self._data.sequences(positions)

        model, groups = self._manifest.model, self._manifest.ownership.groups
        flops = step_flops_per_token(model, groups, len(task.groups))

        def report(step: StepReport) -> None:
            self._link.inbox.check_stop()
            speed = step.tokens_per_second
            mfu = utilisation(speed, flops, self._peak_flops)
            self._link.progress(
                pb.Progress(round=task.round, step=step.steps, loss=step.loss, tokens_per_second=speed, mfu=mfu),
                last=step.steps == plan.steps,
            )

        with _reading_data():
            self._data.prefetch(range(plan.first_sequence, plan.positions(plan.steps - 1).stop))
        return self._learner.train(
            task,
            start,
            self._state.moments,
            sequences=sequences,
            report=report,
            should_cut=should_cut,
        )

    def _report_data(self, what: str, fraction: float) -> None:
        self._link.inbox.check_stop()
        self._link.progress(pb.Progress(text=f"{what} ({fraction:.0%})"), last=fraction >= 1.0)


@contextlib.contextmanager
def _reading_data() -> Iterator[None]:
    try:
        yield
    except DiskFullError:
        raise
    except SpesError as error:
        raise DataError(str(error)) from error


def _is_intact(section: pb.SectionFile) -> bool:
    path = Path(section.path)
    return path.is_file() and file_digest(path) == section.digest
