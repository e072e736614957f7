"""A run of the laboratory from its first round to its measured end."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from spes_p2p.delta.genesis import genesis_tensors
from spes_p2p.lab.methods import METHODS, Method, Round, Sequences, State
from spes_p2p.lab.settings import Settings, rounds_of
from spes_p2p.model.evaluate import bits_per_byte
from spes_protocols.errors import UserError
from spes_protocols.manifest import Manifest

CURVE_POINTS = 10
"""How often the held-out text is looked at on the way."""

CURVE_TOKENS = 1 << 14
"""How much of the held-out text that is; at the end it is all of it."""


_ADVICE = "try a lower --lr"


class DivergedError(UserError):
    """Training left the numbers that can be trained on; other settings may not."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a run's curve: tokens of all peers so far, held-out bits per byte, mean training loss in nats.

    On the way the bits are those of the first `CURVE_TOKENS` tokens at the whole text's bytes per token.
    """

    tokens: int
    bits_per_byte: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run gave: held-out bits per byte of the whole text, bytes that a peer sent, its memory in bytes."""

    bits_per_byte: float
    sent_bytes: int
    device_bytes: int
    host_bytes: int
    tokens: int
    rounds: int
    curve: tuple[Point, ...]


def advance(method: Method, state: State, number: int) -> Round:
    """A round of a method. Raises `DivergedError`."""
    try:
        with np.errstate(all="ignore"):  # the codecs look for what is not finite
            done = method.round(state, number)
    except ValueError as error:  # what no codec carries
        raise DivergedError(f"round {number}: {error}; {_ADVICE}") from None
    if not math.isfinite(done.loss):
        raise DivergedError(f"round {number}: the training loss is {done.loss}; {_ADVICE}")
    return done


def run(
    settings: Settings,
    manifest: Manifest,
    sequences: Sequences,
    heldout: np.ndarray,
    *,
    threads: int = 1,
    report: Callable[[int, float], None] = lambda rounds, loss: None,
) -> Outcome:
    """Train by `settings`, whose manifest is `settings.manifest_of`; `report` hears each round's number and loss.

    `sequences(positions)` gives tokens (n, sequence_length + 1), `heldout` is 1-D. Raises `DivergedError`.
    """
    rounds = rounds_of(manifest)
    model, groups = manifest.model, manifest.ownership.groups
    torch.set_num_threads(threads)
    state: State = dict(genesis_tensors(model, groups, manifest.seed))
    part = heldout[: CURVE_TOKENS + 1]
    part_bytes = round(manifest.data.heldout_bytes * len(part) / len(heldout))
    looks = {round((i + 1) * rounds / CURVE_POINTS) for i in range(CURVE_POINTS)}
    curve: list[Point] = []
    tokens = sent = device = host = 0
    with tempfile.TemporaryDirectory(prefix="spes-lab-") as folder:
        method = METHODS[settings.method](settings, manifest, sequences, Path(folder))
        for number in range(rounds):
            done = advance(method, state, number)
            state = done.state
            tokens += done.tokens
            sent += done.sent_bytes
            device, host = max(device, done.device_bytes), max(host, done.host_bytes)
            for path in Path(folder).iterdir():
                path.unlink()
            if number + 1 in looks:
                value = bits_per_byte(state, model, groups, part, part_bytes, threads=threads)
                curve.append(Point(tokens=tokens, bits_per_byte=value, loss=done.loss))
            report(number + 1, done.loss)
    value = bits_per_byte(state, model, groups, heldout, manifest.data.heldout_bytes, threads=threads)
    if not math.isfinite(value):  # the last round's outer step may have gone too far, and nothing trains on it
        raise DivergedError(f"the last state gives {value} bits per byte; {_ADVICE}")
    return Outcome(
        bits_per_byte=value,
        sent_bytes=sent,
        device_bytes=device,
        host_bytes=host,
        tokens=tokens,
        rounds=rounds,
        curve=tuple(curve),
    )
