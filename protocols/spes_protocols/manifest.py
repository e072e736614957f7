"""The run manifest: everything that fixes a run, as one record (SPEC 3.1, docs/manifest.md).

The organizer writes it as TOML; signed, its canonical bytes are what `run_id` is the digest of. Each field says its
allowed range, so a wrong value is named with its key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from spes_protocols.codec import Matches, OneOf, Range, Size
from spes_protocols.errors import SchemaError
from spes_protocols.messages import SHARED, CodecName
from spes_protocols.types import GROUPS_MAX, LEAF_BYTES, PEERS_MAX, Count, DigestOrNil, PeerId

Positive = Annotated[int, Range(1, 2**40)]
Fraction = Annotated[float, Range(0.0, 1.0)]
Seconds = Annotated[float, Range(0.0, 86_400.0)]
HexDigest = Annotated[str, Matches(r"[0-9a-f]{64}", "a SHA-256 digest, 64 hexadecimal digits")]

INDEX_BYTES_MAX = 3 * 1024 * 1024
"""A snapshot's index must fit into one reply (SPEC 8.2, 10.2)."""

_TENSOR_RECORD_BYTES = 88
_DIGEST_BYTES = 34


@dataclass(frozen=True, kw_only=True)
class Model:
    """Architecture, named as in `transformers`' configurations of OLMoE and, with `qk_norm = "head"`, Qwen3-MoE.

    `num_key_value_heads` 0 means as many as `num_attention_heads`, `head_dim` 0 means `hidden_size` divided by them.
    """

    vocab_size: Annotated[int, Range(16, 1_000_000)]
    hidden_size: Annotated[int, Range(8, 65_536)]
    intermediate_size: Annotated[int, Range(8, 262_144)]
    num_hidden_layers: Annotated[int, Range(1, 256)]
    num_attention_heads: Annotated[int, Range(1, 512)]
    num_experts: Annotated[int, Range(1, 4096)]
    num_experts_per_tok: Annotated[int, Range(1, 64)]
    sequence_length: Annotated[int, Range(8, 1_048_576)]
    rope_theta: Annotated[float, Range(1.0, 1e9)] = 500_000.0
    rms_norm_eps: Annotated[float, Range(1e-12, 1e-2)] = 1e-6
    initializer_range: Annotated[float, Range(1e-5, 1.0)] = 0.02
    num_key_value_heads: Annotated[int, Range(0, 512)] = 0
    head_dim: Annotated[int, Range(0, 1024)] = 0
    qk_norm: Annotated[str, OneOf(("width", "head"))] = "width"
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        multiple, odd = divmod(self.hidden_size, self.num_attention_heads)
        if not self.head_dim and (odd or multiple % 2):
            raise SchemaError(
                "hidden_size", self.hidden_size, f"an even multiple of num_attention_heads = {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise SchemaError("head_dim", self.head_dim, "an even number: rotary positions turn pairs")
        if self.head_dim and self.qk_norm == "width":
            raise SchemaError("head_dim", self.head_dim, 'qk_norm = "head" beside it, as no known model has both')
        if self.num_attention_heads % self.kv_heads:
            raise SchemaError(
                "num_key_value_heads", self.kv_heads, f"a divisor of num_attention_heads = {self.num_attention_heads}"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise SchemaError(
                "num_experts_per_tok", self.num_experts_per_tok, f"at most num_experts = {self.num_experts}"
            )
        if self.index_bytes > INDEX_BYTES_MAX:
            raise SchemaError(
                "", f"{self.num_hidden_layers} layers of {self.num_experts} experts",
                f"a smaller model: the index of a snapshot would take {self.index_bytes} of {INDEX_BYTES_MAX} bytes",
            )  # fmt: skip

    @property
    def kv_heads(self) -> int:
        """How many heads keys and values have, each shared by as many queries' heads as there are for one."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def index_bytes(self) -> int:
        """What the index of a snapshot takes at most: a record for each tensor, a digest for each of its leaves."""
        width, layers = self.hidden_size, self.num_hidden_layers
        tensors = (  # (how many, elements of each): embeddings, norms, attention, routers, experts
            (2, self.vocab_size * width),
            (2 * layers + 1, width),
            (2 * layers, max(width, self.num_attention_heads * self.head_width)),
            (4 * layers, width * self.num_attention_heads * self.head_width),
            (layers, self.num_experts * width),
            (3 * layers * self.num_experts, self.intermediate_size * width),
        )
        sizes = ((count, -(-4 * elements // LEAF_BYTES)) for count, elements in tensors)
        return 64 + sum(count * (_TENSOR_RECORD_BYTES + leaves * _DIGEST_BYTES) for count, leaves in sizes)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW and its cosine schedule over schedule steps."""

    lr: Annotated[float, Range(1e-8, 1.0)]
    lr_min_ratio: Fraction = 0.1
    warmup_steps: Count
    total_steps: Positive
    beta1: Annotated[float, Range(0.0, 0.9999)] = 0.9
    beta2: Annotated[float, Range(0.0, 0.99999)] = 0.95
    eps: Annotated[float, Range(1e-12, 1e-2)] = 1e-8
    weight_decay: Annotated[float, Range(0.0, 1.0)] = 0.1
    grad_clip: Annotated[float, Range(1e-3, 1e3)] = 1.0


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Coefficients of the auxiliary losses."""

    load_balance: Annotated[float, Range(0.0, 1.0)] = 0.01
    router_z: Annotated[float, Range(0.0, 1.0)] = 0.001
    softmax_z: Annotated[float, Range(0.0, 1.0)] = 1e-5


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens find experts while a peer trains: a bias towards the ones it owns, which alone learn from them.

    `owned_bias` is added to the router's logits of owned experts and falls linearly to 0 at `owned_bias_until_step`.
    """

    owned_bias: Annotated[float, Range(0.0, 64.0)] = 0.0
    owned_bias_until_step: Count = 0

    def __post_init__(self) -> None:
        if self.owned_bias and not self.owned_bias_until_step:
            raise SchemaError("owned_bias_until_step", 0, "the schedule step at which owned_bias has fallen to 0")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """From schedule step `from_step` on: `steps` local steps a round (H), `batch_sequences` sequences a step."""

    from_step: Count
    steps: Annotated[int, Range(1, 10_000)]
    batch_sequences: Annotated[int, Range(1, 65_536)]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Rules of a round. Quorums and order of votes are SPEC 5 and not for the manifest to change."""

    phases: Annotated[tuple[Phase, ...], Size(1, 16)]
    lag: Annotated[int, Range(0, 1)] = 0
    lag_from_step: Count = 0
    grace_seconds: Seconds = 30.0
    blob_seconds: Seconds = 300.0
    propose_seconds: Annotated[float, Range(0.05, 3600.0)] = 10.0
    vote_seconds: Annotated[float, Range(0.05, 3600.0)] = 10.0
    view_growth: Annotated[float, Range(1.0, 4.0)] = 1.5
    stall_seconds: Annotated[float, Range(1.0, 86_400.0)] = 600.0
    on_majority_loss: Annotated[str, OneOf(("continue", "pause"))] = "continue"
    lease_seconds: Annotated[float, Range(1.0, 604_800.0)] = 3600.0
    lease_rounds: Annotated[int, Range(1, 10_000)] = 3
    offences_max: Annotated[int, Range(1, 10_000)] = 3
    standby_share: Fraction = 0.25
    shared_quota: Annotated[int, Range(1, 4096)] = 64
    norm_limit: Annotated[float, Range(1.0, 1e6)] = 10.0

    def __post_init__(self) -> None:
        steps = [phase.from_step for phase in self.phases]
        if steps[0] != 0 or steps != sorted(set(steps)):
            raise SchemaError("phases", steps, "from_step values that begin at 0 and ascend")
        if self.lease_seconds < self.stall_seconds:
            raise SchemaError("lease_seconds", self.lease_seconds, f"at least stall_seconds = {self.stall_seconds}")


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Expert groups: `groups` of them, each the same experts in every layer."""

    groups: Annotated[int, Range(1, GROUPS_MAX)]
    min_peers: Annotated[int, Range(1, GROUPS_MAX)]
    groups_per_peer_max: Annotated[int, Range(0, GROUPS_MAX)] = 0

    def __post_init__(self) -> None:
        if self.min_peers > self.groups:
            raise SchemaError("min_peers", self.min_peers, f"at most groups = {self.groups}, so that each owns one")

    @property
    def per_peer_max(self) -> int:
        """How many groups one peer may own: the manifest's figure, or ceil(groups / min_peers)."""
        return self.groups_per_peer_max or -(-self.groups // self.min_peers)


@dataclass(frozen=True, kw_only=True)
class Merging:
    """Expert-merging warm-up: off when `interval` is 0. `alpha` falls linearly to 0 at `until_step`."""

    alpha: Fraction = 0.0
    interval: Count = 0
    until_step: Count = 0
    top: Annotated[int, Range(1, 4096)] = 4


@dataclass(frozen=True, kw_only=True)
class Codecs:
    """How deltas are coded: the shared section and the owned groups."""

    shared: CodecName = "int4"
    group: CodecName = "int8"

    def of(self, section: str) -> str:
        """The codec of a section by name."""
        return self.shared if section == SHARED else self.group


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a source. `tokens` counts the tokens it yields (after the tokenizer for text)."""

    url: Annotated[str, Size(1, 2000)]
    sha256: HexDigest
    bytes: Positive
    tokens: Positive


@dataclass(frozen=True, kw_only=True)
class Source:
    """Shards of one kind, mixed with the other sources by `weight`.

    `format`: `npy` (uint16 or uint32 tokens), or text to tokenize: `txt` (one document a file), `jsonl`, `parquet`
    (documents in the column or key `text_key`).
    """

    name: Annotated[str, Matches(r"[a-z0-9][a-z0-9_.-]{0,63}", "a lower-case name")]
    format: Annotated[str, OneOf(("npy", "txt", "jsonl", "parquet"))]
    shards: Annotated[tuple[Shard, ...], Size(1, 100_000)]
    weight: Annotated[float, Range(1e-6, 1e6)] = 1.0
    text_key: Annotated[str, Size(1, 100)] = "text"

    @property
    def tokens(self) -> int:
        """All tokens of the source's shards."""
        return sum(shard.tokens for shard in self.shards)


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A `tokenizers` JSON file; `eos_id` closes each document."""

    url: Annotated[str, Size(1, 2000)]
    sha256: HexDigest
    bytes: Positive
    eos_id: Count


@dataclass(frozen=True, kw_only=True)
class Data:
    """What the run trains on, and the text held out to measure it. `heldout_bytes` is the UTF-8 size of that text."""

    sources: Annotated[tuple[Source, ...], Size(1, 256)]
    heldout: Source
    heldout_bytes: Positive
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Who may claim: anyone, or the peers listed."""

    mode: Annotated[str, OneOf(("open", "allowlist"))] = "open"
    peers: Annotated[tuple[PeerId, ...], Size(0, PEERS_MAX)] = ()


@dataclass(frozen=True, kw_only=True)
class Organizer:
    """Keys that sign organizer records. `keys[0]` signs the manifest; `start_keys` may sign `start` alone."""

    keys: Annotated[tuple[PeerId, ...], Size(1, 16)]
    start_keys: Annotated[tuple[PeerId, ...], Size(0, 64)] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A run. `genesis_root` is the state root of S_0 (SPEC 6.7).

    `genesis` says where S_0 comes from: "seed", computed from `model` and `seed` by everybody, or "snapshot", a state
    that the organizer made, which peers get from each other.
    """

    KIND: ClassVar[str] = "manifest"
    version: Annotated[int, Range(1, 1)] = 1
    name: Annotated[str, Matches(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,63}", "a name of letters, digits, space, _ . -")]
    description: Annotated[str, Size(0, 2000)] = ""
    seed: Annotated[int, Range(0, 2**63 - 1)]
    model: Model
    ownership: Ownership
    optimizer: Optimizer
    loss: Loss = Loss()
    routing: Routing = Routing()
    rounds: Rounds
    merging: Merging = Merging()
    codecs: Codecs = Codecs()
    data: Data
    admission: Admission = Admission()
    organizer: Organizer
    genesis: Annotated[str, OneOf(("seed", "snapshot"))] = "seed"
    genesis_root: DigestOrNil = b""

    def __post_init__(self) -> None:
        if self.model.num_experts % self.ownership.groups:
            raise SchemaError(
                "ownership.groups",
                self.ownership.groups,
                f"a divisor of model.num_experts = {self.model.num_experts}",
            )
        if self.merging.interval and self.merging.top >= self.model.num_experts:
            raise SchemaError(
                "merging.top", self.merging.top, f"less than model.num_experts = {self.model.num_experts}"
            )
        names = [source.name for source in self.data.sources]
        if len(names) != len(set(names)):
            raise SchemaError("data.sources", names, "a different name for each source")

    def phase(self, step: int) -> Phase:
        """The phase in force at a schedule step."""
        return next(phase for phase in reversed(self.rounds.phases) if phase.from_step <= step)

    def round_sequences(self, step: int) -> int:
        """Q: the sequences one member may train on in the round that begins at a schedule step."""
        phase = self.phase(step)
        return phase.steps * phase.batch_sequences

    def round_tokens(self, step: int) -> int:
        """The quota that caps a contribution's weight, in tokens."""
        return self.round_sequences(step) * self.model.sequence_length
