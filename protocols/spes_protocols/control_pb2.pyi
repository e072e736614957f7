from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN: _ClassVar[Outcome]
    COUNTED: _ClassVar[Outcome]
    MISSED: _ClassVar[Outcome]
    REFUSED: _ClassVar[Outcome]
    ABANDONED: _ClassVar[Outcome]
UNKNOWN: Outcome
COUNTED: Outcome
MISSED: Outcome
REFUSED: Outcome
ABANDONED: Outcome

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Done(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("peer", "groups", "missed", "me")
    PEER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    ME_FIELD_NUMBER: _ClassVar[int]
    peer: str
    groups: _containers.RepeatedScalarFieldContainer[int]
    missed: int
    me: bool
    def __init__(self, peer: _Optional[str] = ..., groups: _Optional[_Iterable[int]] = ..., missed: _Optional[int] = ..., me: _Optional[bool] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("peer", "path", "relays", "relay_bytes_per_second")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    RELAY_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    peer: str
    path: str
    relays: _containers.RepeatedScalarFieldContainer[str]
    relay_bytes_per_second: float
    def __init__(self, peer: _Optional[str] = ..., path: _Optional[str] = ..., relays: _Optional[_Iterable[str]] = ..., relay_bytes_per_second: _Optional[float] = ...) -> None: ...

class RelayStatus(_message.Message):
    __slots__ = ("address", "place")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    address: str
    place: str
    def __init__(self, address: _Optional[str] = ..., place: _Optional[str] = ...) -> None: ...

class LossPoint(_message.Message):
    __slots__ = ("round", "train")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    round: int
    train: float
    def __init__(self, round: _Optional[int] = ..., train: _Optional[float] = ...) -> None: ...

class PhaseSeconds(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run_name", "run_id", "organizer", "peer_id", "phase", "round", "state_root", "step", "steps", "loss", "tokens_per_second", "tokens", "members", "links", "losses", "bytes_up", "bytes_down", "last_error", "trainer", "trainer_pid", "addresses", "groups_total", "progress", "progress_text", "phases", "progress_bytes_per_second", "progress_seconds_left", "waiting", "mfu", "limits", "limit_up_bytes_per_second", "limit_down_bytes_per_second", "relays", "reached", "observed", "disk_bytes_max", "relay_quotas")
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ORGANIZER_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_ROOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    TRAINER_PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_TEXT_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MFU_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_UP_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LIMIT_DOWN_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    RELAY_QUOTAS_FIELD_NUMBER: _ClassVar[int]
    run_name: str
    run_id: str
    organizer: str
    peer_id: str
    phase: str
    round: int
    state_root: str
    step: int
    steps: int
    loss: float
    tokens_per_second: float
    tokens: int
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    losses: _containers.RepeatedCompositeFieldContainer[LossPoint]
    bytes_up: int
    bytes_down: int
    last_error: str
    trainer: str
    trainer_pid: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    groups_total: int
    progress: float
    progress_text: str
    phases: _containers.RepeatedCompositeFieldContainer[PhaseSeconds]
    progress_bytes_per_second: float
    progress_seconds_left: float
    waiting: str
    mfu: float
    limits: str
    limit_up_bytes_per_second: float
    limit_down_bytes_per_second: float
    relays: _containers.RepeatedCompositeFieldContainer[RelayStatus]
    reached: str
    observed: str
    disk_bytes_max: int
    relay_quotas: str
    def __init__(self, run_name: _Optional[str] = ..., run_id: _Optional[str] = ..., organizer: _Optional[str] = ..., peer_id: _Optional[str] = ..., phase: _Optional[str] = ..., round: _Optional[int] = ..., state_root: _Optional[str] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., tokens: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ..., losses: _Optional[_Iterable[_Union[LossPoint, _Mapping]]] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., last_error: _Optional[str] = ..., trainer: _Optional[str] = ..., trainer_pid: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., groups_total: _Optional[int] = ..., progress: _Optional[float] = ..., progress_text: _Optional[str] = ..., phases: _Optional[_Iterable[_Union[PhaseSeconds, _Mapping]]] = ..., progress_bytes_per_second: _Optional[float] = ..., progress_seconds_left: _Optional[float] = ..., waiting: _Optional[str] = ..., mfu: _Optional[float] = ..., limits: _Optional[str] = ..., limit_up_bytes_per_second: _Optional[float] = ..., limit_down_bytes_per_second: _Optional[float] = ..., relays: _Optional[_Iterable[_Union[RelayStatus, _Mapping]]] = ..., reached: _Optional[str] = ..., observed: _Optional[str] = ..., disk_bytes_max: _Optional[int] = ..., relay_quotas: _Optional[str] = ...) -> None: ...

class TrainerEvent(_message.Message):
    __slots__ = ("ready", "progress", "round_done", "failed", "skipped")
    READY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ROUND_DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    ready: Ready
    progress: Progress
    round_done: RoundDone
    failed: Failed
    skipped: Skipped
    def __init__(self, ready: _Optional[_Union[Ready, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., round_done: _Optional[_Union[RoundDone, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., skipped: _Optional[_Union[Skipped, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("has_pending", "pending_round", "pid", "device", "pending_epoch")
    HAS_PENDING_FIELD_NUMBER: _ClassVar[int]
    PENDING_ROUND_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PENDING_EPOCH_FIELD_NUMBER: _ClassVar[int]
    has_pending: bool
    pending_round: int
    pid: int
    device: str
    pending_epoch: bytes
    def __init__(self, has_pending: _Optional[bool] = ..., pending_round: _Optional[int] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., pending_epoch: _Optional[bytes] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("round", "step", "loss", "tokens_per_second", "text", "mfu")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MFU_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    loss: float
    tokens_per_second: float
    text: str
    mfu: float
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., text: _Optional[str] = ..., mfu: _Optional[float] = ...) -> None: ...

class SectionFile(_message.Message):
    __slots__ = ("name", "codec", "path", "digest", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    codec: str
    path: str
    digest: bytes
    size: int
    def __init__(self, name: _Optional[str] = ..., codec: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class RoundDone(_message.Message):
    __slots__ = ("round", "sections", "tokens", "steps", "loss", "train_seconds", "encode_seconds", "epoch")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    round: int
    sections: _containers.RepeatedCompositeFieldContainer[SectionFile]
    tokens: int
    steps: int
    loss: float
    train_seconds: float
    encode_seconds: float
    epoch: bytes
    def __init__(self, round: _Optional[int] = ..., sections: _Optional[_Iterable[_Union[SectionFile, _Mapping]]] = ..., tokens: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., train_seconds: _Optional[float] = ..., encode_seconds: _Optional[float] = ..., epoch: _Optional[bytes] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class Skipped(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class TrainerTask(_message.Message):
    __slots__ = ("train", "cut", "stop")
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    train: TrainRound
    cut: CutShort
    stop: Stop
    def __init__(self, train: _Optional[_Union[TrainRound, _Mapping]] = ..., cut: _Optional[_Union[CutShort, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class TrainRound(_message.Message):
    __slots__ = ("round", "state_path", "step", "steps", "batch_sequences", "first_sequence", "groups", "out_dir", "has_outcome", "outcome_round", "outcome", "epoch", "counted", "fresh", "ahead")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_PATH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    OUT_DIR_FIELD_NUMBER: _ClassVar[int]
    HAS_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_ROUND_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    round: int
    state_path: str
    step: int
    steps: int
    batch_sequences: int
    first_sequence: int
    groups: _containers.RepeatedScalarFieldContainer[int]
    out_dir: str
    has_outcome: bool
    outcome_round: int
    outcome: Outcome
    epoch: bytes
    counted: _containers.RepeatedScalarFieldContainer[str]
    fresh: _containers.RepeatedScalarFieldContainer[int]
    ahead: LocalSteps
    def __init__(self, round: _Optional[int] = ..., state_path: _Optional[str] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., batch_sequences: _Optional[int] = ..., first_sequence: _Optional[int] = ..., groups: _Optional[_Iterable[int]] = ..., out_dir: _Optional[str] = ..., has_outcome: _Optional[bool] = ..., outcome_round: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., epoch: _Optional[bytes] = ..., counted: _Optional[_Iterable[str]] = ..., fresh: _Optional[_Iterable[int]] = ..., ahead: _Optional[_Union[LocalSteps, _Mapping]] = ...) -> None: ...

class LocalSteps(_message.Message):
    __slots__ = ("step", "steps", "batch_sequences", "first_sequence")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    batch_sequences: int
    first_sequence: int
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., batch_sequences: _Optional[int] = ..., first_sequence: _Optional[int] = ...) -> None: ...

class CutShort(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
