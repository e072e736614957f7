"""What training costs one peer, before anything is loaded: bytes on the device, in the host, on disk and on the line.

Pure arithmetic on the manifest's numbers and this machine's choices (`core.engine`). `spes plan` prints it, `spes-join`
chooses by it, `benchmarks/memory.py` holds it against what torch measures. What is a tensor is counted tensor by tensor
from `core.tensors`; activations are counted from what the backward pass of `model/moe.py` keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spes_p2p.core.engine import BLOCK, Engine
from spes_p2p.core.tensors import tensor_specs
from spes_protocols.manifest import Model, Phase
from spes_protocols.messages import SHARED, section_group

Device = Literal["cpu", "cuda"]

GIB = 1024**3
MIB = 1024**2

FP32, BF16 = 4, 2
SCALE_BYTES = 4
SMALL_ELEMENTS = 4096
"""Tensors smaller than this keep fp32 moments (`model/moments.py`, as a test compares)."""

LOSS_CHUNK_TOKENS: dict[Device, int] = {"cpu": 256, "cuda": 1024}
"""Tokens whose logits exist at once: those of `model.loss`, which a test compares."""

ADAMW_SLICE_ELEMENTS = 2**22
"""Parameters widened at a time where moments or gradients are narrow (`model.optim`, as a test compares)."""

CUDA_FIXED_BYTES = 768 * MIB
"""The driver's context, cuBLAS' workspaces and what the allocator rounds up: on the card beside every tensor."""

PROCESS_BYTES: dict[Device, int] = {"cpu": 512 * MIB, "cuda": 2048 * MIB}
"""A trainer's process before it has a tensor: Python, torch and, for a card, CUDA's libraries."""

PEER_PROCESSES_BYTES = 448 * MIB
"""The peer, its worker and the network daemon together, without the tensor at hand: an allowance."""

RECORD_BYTES_PER_OWNER = 1000
"""Of a commit: an owner's header, signed vote and row in the member table. With four owners a commit has 3.9 kB."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Parameters, and what each kind of keeping them takes in all: 8-bit blocks begin anew with each tensor.

    `small` of the parameters are in tensors whose moments stay in fp32, and not in `blocks`.
    """

    parameters: int
    blocks: int
    small: int

    def kept(self, form: str) -> int:
        """Bytes of these tensors as fp32, bf16 or int8 with one fp32 scale for each block (`core.engine.BLOCK`)."""
        if form == "int8":
            return self.parameters - self.small + SCALE_BYTES * self.blocks + FP32 * self.small
        return self.parameters * (BF16 if form == "bf16" else FP32)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A model as one peer holds it: shared (psi), owned (Phi_i) and frozen experts, SPES paper section 3.3."""

    shared: Counts
    owned: Counts
    frozen: Counts
    largest: int
    """Elements of the largest tensor."""

    @property
    def trained(self) -> int:
        """Parameters that this peer trains."""
        return self.shared.parameters + self.owned.parameters

    @property
    def parameters(self) -> int:
        """All parameters of the model."""
        return self.trained + self.frozen.parameters


@functools.lru_cache(maxsize=256)
def cut(model: Model, groups: int, owned: int) -> Cut:
    """The model's tensors as a peer with `owned` of `groups` groups holds them; all groups are alike."""
    assert 0 <= owned <= groups
    sizes: dict[str, list[int]] = {"shared": [], "owned": [], "frozen": []}
    for spec in tensor_specs(model, groups):
        group = None if spec.section == SHARED else section_group(spec.section)
        sizes["shared" if group is None else "owned" if group < owned else "frozen"].append(spec.size)
    counts = {
        kind: Counts(
            parameters=sum(found),
            blocks=sum(-(-size // BLOCK) for size in found if kind == "frozen" or size >= SMALL_ELEMENTS),
            small=0 if kind == "frozen" else sum(size for size in found if size < SMALL_ELEMENTS),
        )
        for kind, found in sizes.items()
    }
    return Cut(**counts, largest=max(size for found in sizes.values() for size in found))


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes on the device (a CPU's are the trainer's host memory)."""

    shared: int
    owned: int
    frozen: int
    gradients: int
    moments: int
    activations: int
    logits: int
    workspace: int
    gathered: int = 0
    """Where a model lies in parts on several devices: what of the others' parts is here while it is used."""

    @property
    def weights(self) -> int:
        """All parameters, in the form each is kept in."""
        return self.shared + self.owned + self.frozen

    @property
    def state(self) -> int:
        """Weights, gradients and moments: what does not depend on the batch."""
        return self.weights + self.gradients + self.moments

    @property
    def total(self) -> int:
        """Everything at the fullest moment of a step."""
        return self.state + self.activations + self.logits + self.workspace + self.gathered


def device_memory(
    model: Model,
    groups: int,
    owned: int,
    engine: Engine,
    *,
    sequences: int,
    device: Device,
    sequence_length: int = 0,
    devices: int = 1,
) -> DeviceMemory:
    """What a step takes on the device, or on each of `devices`, with `owned` of `groups` groups.

    `sequences` is a step's whole batch, of which a device takes its share, `engine.micro_batch` at once;
    `sequence_length` 0 is the model's. Weights, gradients and moments are exact, on several devices but for rows that
    do not divide; activations are upper bounds for balanced routing; the workspace is an allowance.
    """
    parts = cut(model, groups, owned)
    share = -(-sequences // devices)
    at_once = min(share, engine.micro_batch or share)
    length = sequence_length or model.sequence_length

    def part(count: int) -> int:
        return -(-count // devices)

    return DeviceMemory(
        shared=part(parts.shared.kept("fp32")),
        owned=part(parts.owned.kept("fp32")),
        frozen=part(parts.frozen.kept(engine.frozen)),
        gradients=part(parts.trained * (BF16 if engine.gradients == "bf16" else FP32)),
        moments=part(2 * (parts.shared.kept(engine.moments) + parts.owned.kept(engine.moments))),
        gathered=gathered_bytes(model, groups, owned, engine) if devices > 1 else 0,
        activations=activation_bytes(model, engine, tokens=at_once * length, device=device),
        logits=logits_bytes(model, tokens=at_once * length, device=device),
        workspace=workspace_bytes(model, engine, tokens=at_once * length, device=device),
    )


def gathered_bytes(model: Model, groups: int, owned: int, engine: Engine) -> int:
    """What a device has of a model in parts beside its own part, at the fullest moment (`model/sharding.py`).

    The output layer and the last norm for a whole pass, with their gradients; of the layers and the embedding the one
    at work and the next, which is fetched meanwhile, and gradients of one as they are and as they are sent.
    """
    weights: dict[str, int] = {}
    gradients: dict[str, int] = {}
    for spec in tensor_specs(model, groups):
        words = spec.name.split(".")
        unit = ".".join(words[:3]) if words[1] == "layers" else "embedding" if words[1] == "embed_tokens" else "rest"
        group = None if spec.section == SHARED else section_group(spec.section)
        trained = group is None or group < owned
        kept = FP32 if trained or engine.frozen == "fp32" else BF16 if engine.frozen == "bf16" else 1
        weights[unit] = weights.get(unit, 0) + kept * spec.size
        gradients[unit] = gradients.get(unit, 0) + (FP32 * spec.size if trained else 0)
    rest = weights.pop("rest") + gradients.pop("rest")
    return rest + 2 * max(weights.values()) + 2 * max(gradients.values())


def compute_bytes(device: Device) -> int:
    """Bytes of an element in the compute dtype: bf16 on a GPU, fp32 on a CPU."""
    return BF16 if device == "cuda" else FP32


def activation_bytes(model: Model, engine: Engine, *, tokens: int, device: Device) -> int:
    """What the backward pass of a micro-batch of `tokens` tokens needs of the forward pass.

    Derivation, with c bytes in the compute dtype, T tokens, R = T * top-k rows, D, F, E as in `model/moe.py`, and Q and
    K the widths of all heads of queries and of keys. Each layer keeps

        4 T * 2 D           the residual stream before each of its two norms, in fp32
        c T * D + 4 T * D   what q, k and v read; what the router reads, in fp32
        c T * (3 Q + 3 K)   q and k before their norm and after the rotation, v, attention's result
        4 T * heads         attention's log-sum-exp
        8 T * E + 32 R      the router's logits and softmax; which expert each row goes to, there and back
        c R * (2 D + 4 F)   experts: rows in and out, gate, its SiLU, up, their product

    and on a CPU, whose norms are put together from single operations, each norm's input in fp32 once more, and where
    heads share keys attention's result in another order. A frozen expert does not keep its product, so this is an upper
    bound, and nearly reached where all experts are owned. Weights in another form than the compute dtype are converted
    for one product at a time and kept in neither pass (`model/frozen.py`). With `recompute` a layer keeps only its
    residual stream and the router's two fp32 tables, and one layer at a time has all of the above.
    """
    c, layers = compute_bytes(device), model.num_hidden_layers
    width, hidden, experts = model.hidden_size, model.intermediate_size, model.num_experts
    queries, keys = model.num_attention_heads * model.head_width, model.kv_heads * model.head_width
    rows = tokens * model.num_experts_per_tok
    layer = FP32 * tokens * 2 * width + (c + FP32) * tokens * width + 3 * c * tokens * (queries + keys)
    layer += FP32 * tokens * model.num_attention_heads + 8 * tokens * experts + 32 * rows
    layer += c * rows * (2 * width + 4 * hidden)
    if device == "cpu":
        layer += FP32 * tokens * (2 * width + queries + keys + (queries if keys < queries else 0))
    ends = tokens * width * (2 * FP32 + c)
    if engine.recompute:
        return layers * tokens * (FP32 * width + 8 * experts) + layer + ends
    return layers * layer + ends


def logits_bytes(model: Model, *, tokens: int, device: Device) -> int:
    """What the loss takes (`model/loss.py`).

    A chunk of logits in fp32, and in the compute dtype where that is narrower; the output layer's gradient while it is
    summed, in fp32, and where the compute dtype is narrower the layer itself and one chunk's gradient in it; the
    gradient of the hidden states.
    """
    c, chunk, head = compute_bytes(device), min(tokens, LOSS_CHUNK_TOKENS[device]), model.vocab_size * model.hidden_size
    narrow = c if c != FP32 else 0
    return chunk * model.vocab_size * (FP32 + narrow) + head * (FP32 + 2 * narrow) + c * tokens * model.hidden_size


def workspace_bytes(model: Model, engine: Engine, *, tokens: int, device: Device) -> int:
    """What comes and goes: gradients of one layer's activations, or AdamW's slices in fp32; a card's fixed share."""
    c, rows = compute_bytes(device), tokens * model.num_experts_per_tok
    backward = c * (rows * (2 * model.hidden_size + 3 * model.intermediate_size) + 4 * tokens * model.hidden_size)
    largest_matrix = FP32 * model.hidden_size * model.intermediate_size
    largest = model.hidden_size * max(model.vocab_size, model.intermediate_size)
    is_narrow = engine.moments == "int8" or engine.gradients == "bf16"
    slices = 8 * FP32 * min(largest, ADAMW_SLICE_ELEMENTS) if is_narrow else 0
    return max(backward + largest_matrix, slices) + (CUDA_FIXED_BYTES if device == "cuda" else 0)


def step_flops_per_token(model: Model, groups: int, owned: int, sequence_length: int = 0) -> float:
    """Floating-point operations that a training step needs for a token, for the share of a machine's peak (MFU).

    Two for each weight that a token meets in the forward pass; twice that again in the backward pass where the weight
    is trained, once where it is frozen (the gradient of its input alone); causal attention meets half of the sequence.
    Tokens are taken to be balanced over experts. Recomputing is not counted.
    """
    length = sequence_length or model.sequence_length
    queries, keys = model.num_attention_heads * model.head_width, model.kv_heads * model.head_width
    width, layers = model.hidden_size, model.num_hidden_layers
    shared = layers * (2 * width * (queries + keys) + model.num_experts * width) + model.vocab_size * width
    experts = layers * model.num_experts_per_tok * 3 * width * model.intermediate_size
    attention = layers * queries * length
    return 6.0 * shared + experts * (4.0 + 2.0 * owned / groups) + 6.0 * attention


@dataclass(frozen=True, kw_only=True)
class Files:
    """Exact sizes of a run's files, from `store.states.Layout` and `delta.codecs.section_bytes`."""

    state_bytes: int
    shared_bytes: int
    group_bytes: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one peer in one round, without votes and headers, which are some kilobytes.

    Without a server everybody fetches everybody's contribution, so on average a peer sends its own once to each other.
    """

    contribution: int
    """With a shared section in it."""
    received: int
    sent: int


def traffic(files: Files, *, peers: int, groups: int, owned: int, senders: int) -> Traffic:
    """A round of `peers` peers who own `groups` groups together, `owned` of them this one.

    `senders` of them are drawn to send their shared section (the manifest's `shared_quota`).
    """
    drawn = round(files.shared_bytes * senders / peers)  # of one peer, on average
    return Traffic(
        contribution=files.shared_bytes + owned * files.group_bytes,
        received=(peers - 1) * drawn + (groups - owned) * files.group_bytes,
        sent=(peers - 1) * (drawn + owned * files.group_bytes),
    )


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Least bytes on disk, without the training text's cache."""

    states: int
    blobs: int
    trainer: int
    log_round: int
    """What a round adds to a log that keeps every blob: an archive's, or one that is to be replayed."""

    @property
    def total(self) -> int:
        """States, blobs and the trainer's own."""
        return self.states + self.blobs + self.trainer


def disk(model: Model, files: Files, *, peers: int, groups: int, owned: int, senders: int) -> Disk:
    """Two states and a third while it is written, two rounds' blobs (SPEC 8.4), the trainer's state twice while it is
    replaced: two moments, a residual and the one in case the contribution counts, fp32 each, and its blobs.
    """
    trained = cut(model, groups, owned).trained
    blobs = senders * files.shared_bytes + groups * files.group_bytes
    return Disk(
        states=3 * files.state_bytes,
        blobs=2 * blobs,
        trainer=2 * 4 * FP32 * trained + files.shared_bytes + owned * files.group_bytes,
        log_round=blobs + RECORD_BYTES_PER_OWNER * peers,
    )


def host_bytes(model: Model, groups: int, owned: int, *, device: Device, devices: int = 1, ahead: bool = False) -> int:
    """Memory of all the peer's processes in the host, without what a CPU trains on (`device_memory`).

    While a tensor is coded, the trainer holds it with its state, delta and residual and what the delta decodes to. The
    worker holds a tensor and the pieces it comes from, in a round that merges also a layer's gates in int8. States and
    residuals are mapped files: the system takes their memory back. With `ahead` the trainer of a single device also
    keeps the weights from which it has begun the next round, and a copy of the moments while it writes them (SPEC 6.9).
    """
    parts = cut(model, groups, owned)
    gates = model.num_experts * model.hidden_size * model.intermediate_size
    trainer = devices * PROCESS_BYTES[device] + 5 * FP32 * parts.largest
    trainer += 3 * FP32 * parts.trained if ahead and devices == 1 else 0
    return trainer + PEER_PROCESSES_BYTES + 2 * FP32 * parts.largest + gates


def apply_work_bytes(model: Model, groups: int, *, peers: int) -> int:
    """What applying a round touches, in bytes of fp32: the state read and the new one written and hashed, each
    peer's shared section and each group's decoded once. A machine's rate is this over the seconds it took.
    """
    parts = cut(model, groups, groups)
    return FP32 * (2 * parts.parameters + peers * parts.shared.parameters + parts.owned.parameters)


def rounds_of(phases: Sequence[Phase], total_steps: int) -> int:
    """How many rounds a schedule of `total_steps` steps has, by its phases."""
    ends = [*(phase.from_step for phase in phases[1:]), total_steps]
    spans = [(phase, min(end, total_steps) - phase.from_step) for phase, end in zip(phases, ends, strict=True)]
    return sum(-(-steps // phase.steps) for phase, steps in spans if steps > 0)
