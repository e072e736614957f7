"""One run of the laboratory: what is trained, by which method, with which settings; and the manifest that says it.

A run is known by its settings: they are the columns of the table, and a run whose row is there is not run again.
Settings that a method does not know are brought to one value, so that a sweep over them trains it once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spes_protocols.errors import UserError
from spes_protocols.manifest import (
    Codecs,
    Data,
    Manifest,
    Merging,
    Model,
    Optimizer,
    Organizer,
    Ownership,
    Phase,
    Rounds,
    Routing,
)

METHODS = ("spes", "diloco", "fedavg", "central")

LAG_STARTS = ("own", "half", "agreed")

NANO = Model(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    sequence_length=64,
    rope_theta=10_000.0,
)
"""Half a million parameters: a run of half a million tokens takes about a minute of one core."""

_WARMUP_SHARE = 0.05
_NOBODY = "12D3KooW" + "1" * 44
"""The manifest of a laboratory run is never signed; its organizer's place holds this."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. `tokens` are those of all peers together; `h` local steps a round, `batch` sequences a peer and step.

    `lr` is the peak of the learning rate. Merging and the bias are as in the manifest, but `merge_until` and
    `bias_until` are shares of the run and an interval of 0 is every round. `outer_lr` and `outer_momentum` are
    DiLoCo's (Nesterov). `owner_lr` multiplies the learning rate of owned experts, `rotate` moves each group to the next
    peer every so many rounds (0: never). Without a codec, `spes` has the swarm's (int4, int8), the others fp32, as they
    were published; they code the whole model with `codec_shared`.

    With a `lag` of 1 (`spes`, `diloco`) round r + 1 begins from a peer's own weights (`lag_start` "own"), from S_r
    without its movement since ("agreed"), or from S_r with half of it in what all train and its own weights in what it
    owns ("half"); and S_{r+1} is there after a share of `lag_arrival` of its steps, rounded to whole ones and at least
    one. Rounds that begin before a share of `lag_from` of the run have none.
    """

    method: str
    model: str = "nano"
    peers: int = 4
    h: int = 20
    seed: int = 0
    tokens: int = 512_000
    batch: int = 4
    lr: float = 3e-3
    codec_shared: str = ""
    codec_group: str = ""
    merge_alpha: float = 0.0
    merge_interval: int = 0
    merge_until: float = 0.25
    bias: float = 0.0
    bias_until: float = 1.0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    owner_lr: float = 1.0
    rotate: int = 0
    lag: int = 0
    lag_arrival: float = 1.0
    lag_start: str = "own"
    lag_from: float = 0.0

    def normal(self) -> Settings:
        """The same run with what its method does not know at one value."""
        defaults = ("int4", "int8") if self.method == "spes" else ("fp32", "fp32")
        changes: dict[str, object] = {
            "codec_shared": self.codec_shared or defaults[0],
            "codec_group": self.codec_group or defaults[1],
        }
        if self.method != "spes":
            changes |= {"merge_alpha": 0.0, "bias": 0.0, "owner_lr": 1.0, "rotate": 0}
        if self.method == "central":
            changes |= {"codec_shared": "fp32", "codec_group": "fp32"}
        elif self.method != "spes":
            changes |= {"codec_group": changes["codec_shared"]}
        if self.method == "fedavg":
            changes |= {"outer_lr": 1.0, "outer_momentum": 0.0}
        elif self.method != "diloco":
            changes |= {"outer_lr": 0.0, "outer_momentum": 0.0}
        if self.method not in ("spes", "diloco"):
            changes["lag"] = 0
        result = dataclasses.replace(self, **changes)  # type: ignore[arg-type]
        merging, biased, ahead = bool(result.merge_alpha), bool(result.bias), bool(result.lag)
        return dataclasses.replace(
            result,
            merge_interval=(result.merge_interval or result.h) if merging else 0,
            merge_until=result.merge_until if merging else 0.0,
            bias_until=result.bias_until if biased else 0.0,
            lag_arrival=result.lag_arrival if ahead else 0.0,
            lag_start=result.lag_start if ahead else "",
            lag_from=result.lag_from if ahead else 0.0,
        )

    @property
    def variant(self) -> str:
        """Everything but the seed, in a few words: rows with one variant are runs of one cell of the table."""
        words = [self.method]
        if self.method == "diloco":
            plain = self.outer_lr == 1.0 and self.outer_momentum == 0.0
            words.append("plain mean" if plain else f"Nesterov {self.outer_lr:g}/{self.outer_momentum:g}")
        if self.merge_alpha:
            interval = "" if self.merge_interval == self.h else f" every {self.merge_interval}"
            words.append(f"merging {self.merge_alpha:g}{interval} until {self.merge_until:g}")
        if self.bias:
            words.append(f"bias {self.bias:g} until {self.bias_until:g}")
        if self.owner_lr != 1.0:
            words.append(f"owners' lr x{self.owner_lr:g}")
        if self.rotate:
            words.append(f"rotating every {self.rotate}")
        if self.lag:
            start = {"own": "", "half": " from half", "agreed": " from the agreed state"}[self.lag_start]
            since = f" after {self.lag_from:g}" if self.lag_from else ""
            words.append(f"lag {self.lag}{since}{start}, arrival {self.lag_arrival:g}")
        usual = Settings(method=self.method).normal()
        if (self.codec_shared, self.codec_group) != (usual.codec_shared, usual.codec_group):
            words.append(f"{self.codec_shared}/{self.codec_group}")
        for name in ("model", "batch", "lr"):
            value = getattr(self, name)
            if value != getattr(usual, name):
                words.append(f"{name} {value}")
        return ", ".join(words)


def manifest_of(settings: Settings, model: Model, data: Data) -> Manifest:
    """The run as a manifest, for the code that trains and applies in the swarm. Raises `UserError` for what cannot be.

    The number of rounds follows from the tokens, and is a whole one.
    """
    round_tokens = settings.peers * settings.h * settings.batch * model.sequence_length
    rounds = settings.tokens // round_tokens
    if not rounds:
        raise UserError(
            f"--tokens {settings.tokens} is less than one round: {settings.peers} peers x {settings.h} steps x "
            f"{settings.batch} sequences x {model.sequence_length} tokens are {round_tokens}"
        )
    if model.num_experts % settings.peers:
        raise UserError(f"--peers {settings.peers}: expected a divisor of the model's {model.num_experts} experts")
    steps = rounds * settings.h
    return Manifest(
        name="lab",
        seed=settings.seed,
        model=model,
        ownership=Ownership(groups=settings.peers, min_peers=settings.peers),
        optimizer=Optimizer(lr=settings.lr, warmup_steps=max(1, round(_WARMUP_SHARE * steps)), total_steps=steps),
        routing=Routing(owned_bias=settings.bias, owned_bias_until_step=round(settings.bias_until * steps)),
        rounds=Rounds(
            phases=(Phase(from_step=0, steps=settings.h, batch_sequences=settings.batch),),
            lag=settings.lag,
            lag_from_step=round(settings.lag_from * steps),
        ),
        merging=Merging(
            alpha=settings.merge_alpha,
            interval=settings.merge_interval,
            until_step=round(settings.merge_until * steps),
        ),
        codecs=Codecs(shared=settings.codec_shared, group=settings.codec_group),
        data=data,
        organizer=Organizer(keys=(_NOBODY,)),
    )


def rounds_of(manifest: Manifest) -> int:
    """How many rounds a laboratory run has."""
    return manifest.optimizer.total_steps // manifest.rounds.phases[0].steps


def sweep(choices: Mapping[str, Sequence[object]]) -> list[Settings]:
    """Every combination of the values given for fields of `Settings`, each run once; the seed changes fastest.

    A run that a combination does not change (merging for DiLoCo, say) appears once.
    """
    names = sorted(choices, key=lambda name: name == "seed")
    combinations = itertools.product(*(choices[name] for name in names))
    runs = (Settings(**dict(zip(names, values, strict=True))).normal() for values in combinations)  # type: ignore[arg-type]
    return list(dict.fromkeys(runs))
