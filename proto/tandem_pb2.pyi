from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ERROR: FinishReason

class ModelCard(_message.Message):
    __slots__ = ("name", "path", "fingerprint", "max_model_len", "vocab_size", "eos_token_ids", "scoring", "labels")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCORING_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    scoring: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., scoring: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "free_blocks", "total_blocks", "queued_prefill_tokens", "transfers", "prefill_tokens_per_second", "reserved_blocks", "cached_blocks", "owned_blocks", "links", "leases", "block_size", "link_rates")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LINK_RATES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    queued_prefill_tokens: int
    transfers: int
    prefill_tokens_per_second: float
    reserved_blocks: int
    cached_blocks: int
    owned_blocks: int
    links: int
    leases: int
    block_size: int
    link_rates: _containers.RepeatedCompositeFieldContainer[LinkRate]
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., transfers: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., reserved_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., owned_blocks: _Optional[int] = ..., links: _Optional[int] = ..., leases: _Optional[int] = ..., block_size: _Optional[int] = ..., link_rates: _Optional[_Iterable[_Union[LinkRate, _Mapping]]] = ...) -> None: ...

class LinkRate(_message.Message):
    __slots__ = ("node_id", "tokens_per_second")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    tokens_per_second: float
    def __init__(self, node_id: _Optional[str] = ..., tokens_per_second: _Optional[float] = ...) -> None: ...

class Prefixes(_message.Message):
    __slots__ = ("version", "base", "block_size", "stride", "added", "removed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    version: int
    base: int
    block_size: int
    stride: int
    added: bytes
    removed: bytes
    def __init__(self, version: _Optional[int] = ..., base: _Optional[int] = ..., block_size: _Optional[int] = ..., stride: _Optional[int] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("node_id", "epoch", "role", "address", "model", "load", "version", "capabilities", "prefixes")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    role: Role
    address: str
    model: ModelCard
    load: Load
    version: str
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    prefixes: Prefixes
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., model: _Optional[_Union[ModelCard, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., version: _Optional[str] = ..., capabilities: _Optional[_Iterable[str]] = ..., prefixes: _Optional[_Union[Prefixes, _Mapping]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("router_epoch", "heartbeat_seconds", "prefix_version")
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_epoch: int
    heartbeat_seconds: float
    prefix_version: int
    def __init__(self, router_epoch: _Optional[int] = ..., heartbeat_seconds: _Optional[float] = ..., prefix_version: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "epoch", "load", "draining", "prefixes")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    load: Load
    draining: bool
    prefixes: Prefixes
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., draining: _Optional[bool] = ..., prefixes: _Optional[_Union[Prefixes, _Mapping]] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "labels", "value")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    labels: _containers.ScalarMap[str, str]
    value: float
    def __init__(self, name: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., value: _Optional[float] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("known", "drain", "prefix_version", "role", "drain_seconds", "unreachable")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    known: bool
    drain: bool
    prefix_version: int
    role: Role
    drain_seconds: float
    unreachable: str
    def __init__(self, known: _Optional[bool] = ..., drain: _Optional[bool] = ..., prefix_version: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., drain_seconds: _Optional[float] = ..., unreachable: _Optional[str] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("node_id", "epoch", "failure")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    failure: str
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("node_id", "epoch", "role", "address", "draining", "load", "requests", "next_role", "heartbeat_age_seconds", "version", "unreachable")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROLE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    role: Role
    address: str
    draining: bool
    load: Load
    requests: int
    next_role: Role
    heartbeat_age_seconds: float
    version: str
    unreachable: str
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., draining: _Optional[bool] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., requests: _Optional[int] = ..., next_role: _Optional[_Union[Role, str]] = ..., heartbeat_age_seconds: _Optional[float] = ..., version: _Optional[str] = ..., unreachable: _Optional[str] = ...) -> None: ...

class AbsentNode(_message.Message):
    __slots__ = ("node_id", "role", "address", "refused", "reason", "seconds_ago", "failed", "returned")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    role: Role
    address: str
    refused: bool
    reason: str
    seconds_ago: float
    failed: bool
    returned: bool
    def __init__(self, node_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., refused: _Optional[bool] = ..., reason: _Optional[str] = ..., seconds_ago: _Optional[float] = ..., failed: _Optional[bool] = ..., returned: _Optional[bool] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("nodes", "absent", "version", "heartbeat_seconds", "open_files", "open_file_limit")
    NODES_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    absent: _containers.RepeatedCompositeFieldContainer[AbsentNode]
    version: str
    heartbeat_seconds: float
    open_files: int
    open_file_limit: int
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., absent: _Optional[_Iterable[_Union[AbsentNode, _Mapping]]] = ..., version: _Optional[str] = ..., heartbeat_seconds: _Optional[float] = ..., open_files: _Optional[int] = ..., open_file_limit: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node_id", "timeout_seconds")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    timeout_seconds: float
    def __init__(self, node_id: _Optional[str] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("node_id", "role", "force")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    role: Role
    force: bool
    def __init__(self, node_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., force: _Optional[bool] = ...) -> None: ...

class SetRoleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerPart(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    def __init__(self, content: _Optional[bytes] = ...) -> None: ...

class ExamineRequest(_message.Message):
    __slots__ = ("prefill",)
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    prefill: _containers.RepeatedCompositeFieldContainer[PrefillCandidate]
    def __init__(self, prefill: _Optional[_Iterable[_Union[PrefillCandidate, _Mapping]]] = ...) -> None: ...

class ExamineReply(_message.Message):
    __slots__ = ("pairs", "left_out")
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    pairs: _containers.RepeatedCompositeFieldContainer[PairReport]
    left_out: int
    def __init__(self, pairs: _Optional[_Iterable[_Union[PairReport, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class PairReport(_message.Message):
    __slots__ = ("node_id", "address", "problem", "cause", "round_trip_seconds", "canary_seconds", "carrier", "bytes_per_token", "tokens_per_second")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CANARY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    problem: str
    cause: str
    round_trip_seconds: float
    canary_seconds: float
    carrier: str
    bytes_per_token: float
    tokens_per_second: float
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., problem: _Optional[str] = ..., cause: _Optional[str] = ..., round_trip_seconds: _Optional[float] = ..., canary_seconds: _Optional[float] = ..., carrier: _Optional[str] = ..., bytes_per_token: _Optional[float] = ..., tokens_per_second: _Optional[float] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "logprobs", "prompt_logprobs", "n", "allowed_token_ids", "bad_words", "logprob_token_ids", "structured_outputs", "thinking")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    n: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    structured_outputs: StructuredOutputs
    thinking: ThinkingBudget
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., structured_outputs: _Optional[_Union[StructuredOutputs, _Mapping]] = ..., thinking: _Optional[_Union[ThinkingBudget, _Mapping]] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("tokens", "start", "end", "param", "calls")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    start: str
    end: str
    param: str
    calls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tokens: _Optional[int] = ..., start: _Optional[str] = ..., end: _Optional[str] = ..., param: _Optional[str] = ..., calls: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "tool_calls", "compact", "reasoning_end", "param", "reasoning_start")
    JSON_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    COMPACT_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    REASONING_START_FIELD_NUMBER: _ClassVar[int]
    json: str
    regex: str
    choice: ChoiceList
    grammar: str
    json_object: bool
    structural_tag: str
    tool_calls: str
    compact: bool
    reasoning_end: str
    param: str
    reasoning_start: str
    def __init__(self, json: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[ChoiceList, _Mapping]] = ..., grammar: _Optional[str] = ..., json_object: _Optional[bool] = ..., structural_tag: _Optional[str] = ..., tool_calls: _Optional[str] = ..., compact: _Optional[bool] = ..., reasoning_end: _Optional[str] = ..., param: _Optional[str] = ..., reasoning_start: _Optional[str] = ...) -> None: ...

class ChoiceList(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling", "priority", "cache_salt", "prefill", "deadline_seconds", "internal_id", "deaths", "embed", "resume")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INTERNAL_ID_FIELD_NUMBER: _ClassVar[int]
    DEATHS_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    priority: int
    cache_salt: str
    prefill: _containers.RepeatedCompositeFieldContainer[PrefillCandidate]
    deadline_seconds: float
    internal_id: int
    deaths: int
    embed: Embed
    resume: _containers.RepeatedCompositeFieldContainer[Resumed]
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., prefill: _Optional[_Iterable[_Union[PrefillCandidate, _Mapping]]] = ..., deadline_seconds: _Optional[float] = ..., internal_id: _Optional[int] = ..., deaths: _Optional[int] = ..., embed: _Optional[_Union[Embed, _Mapping]] = ..., resume: _Optional[_Iterable[_Union[Resumed, _Mapping]]] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("index", "tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Embed(_message.Message):
    __slots__ = ("pooling", "normalize", "dimensions", "score", "second_text")
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_FIELD_NUMBER: _ClassVar[int]
    pooling: str
    normalize: bool
    dimensions: int
    score: bool
    second_text: int
    def __init__(self, pooling: _Optional[str] = ..., normalize: _Optional[bool] = ..., dimensions: _Optional[int] = ..., score: _Optional[bool] = ..., second_text: _Optional[int] = ...) -> None: ...

class StreamRequest(_message.Message):
    __slots__ = ("number", "generate", "cancel", "request_id", "traceparent")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    number: int
    generate: GenerateRequest
    cancel: bool
    request_id: str
    traceparent: str
    def __init__(self, number: _Optional[int] = ..., generate: _Optional[_Union[GenerateRequest, _Mapping]] = ..., cancel: _Optional[bool] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class StreamEvents(_message.Message):
    __slots__ = ("numbers", "choices", "tokens", "events")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("number", "generated", "ended")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    number: int
    generated: GenerateEvent
    ended: RequestEnd
    def __init__(self, number: _Optional[int] = ..., generated: _Optional[_Union[GenerateEvent, _Mapping]] = ..., ended: _Optional[_Union[RequestEnd, _Mapping]] = ...) -> None: ...

class RequestEnd(_message.Message):
    __slots__ = ("status", "details")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    status: int
    details: str
    def __init__(self, status: _Optional[int] = ..., details: _Optional[str] = ...) -> None: ...

class EndChoiceRequest(_message.Message):
    __slots__ = ("internal_id", "index")
    INTERNAL_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    internal_id: int
    index: int
    def __init__(self, internal_id: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class EndChoiceReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillCandidate(_message.Message):
    __slots__ = ("node_id", "epoch", "address", "queued_prefill_tokens", "prefill_tokens_per_second")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    address: str
    queued_prefill_tokens: int
    prefill_tokens_per_second: float
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., queued_prefill_tokens: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob", "rank")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    rank: int
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("chosen", "packed_top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    packed_top: bytes
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., packed_top: _Optional[bytes] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("node_epoch",)
    NODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_epoch: int
    def __init__(self, node_epoch: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("index", "tokens", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    def __init__(self, index: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("positions",)
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    def __init__(self, positions: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("index", "reason", "stop_token", "error", "stop_logprobs", "unfollowable")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    UNFOLLOWABLE_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: FinishReason
    stop_token: int
    error: str
    stop_logprobs: PositionLogprobs
    unfollowable: bool
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., stop_token: _Optional[int] = ..., error: _Optional[str] = ..., stop_logprobs: _Optional[_Union[PositionLogprobs, _Mapping]] = ..., unfollowable: _Optional[bool] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "remote_tokens", "prefill_node", "local_reason", "first_token", "remote_cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REMOTE_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    remote_tokens: int
    prefill_node: str
    local_reason: str
    first_token: FirstToken
    remote_cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., remote_tokens: _Optional[int] = ..., prefill_node: _Optional[str] = ..., local_reason: _Optional[str] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., remote_cached_tokens: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("queue_seconds", "greet_seconds", "prefill_seconds", "transfer_seconds", "step_seconds", "failed_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GREET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    greet_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    step_seconds: float
    failed_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., greet_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., transfer_seconds: _Optional[float] = ..., step_seconds: _Optional[float] = ..., failed_seconds: _Optional[float] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("admitted", "tokens", "prompt_logprobs", "finished", "usage", "prefill_died", "embedding")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DIED_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    admitted: Admitted
    tokens: Tokens
    prompt_logprobs: PromptLogprobs
    finished: Finished
    usage: Usage
    prefill_died: PrefillDied
    embedding: Embedding
    def __init__(self, admitted: _Optional[_Union[Admitted, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., prefill_died: _Optional[_Union[PrefillDied, _Mapping]] = ..., embedding: _Optional[_Union[Embedding, _Mapping]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    def __init__(self, values: _Optional[bytes] = ...) -> None: ...

class PrefillDied(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("prefix_version", "without_metrics")
    PREFIX_VERSION_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_METRICS_FIELD_NUMBER: _ClassVar[int]
    prefix_version: int
    without_metrics: bool
    def __init__(self, prefix_version: _Optional[int] = ..., without_metrics: _Optional[bool] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("node_id", "epoch", "role", "ready", "draining", "load", "model", "metrics", "refused", "version", "prefixes", "capabilities")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    role: Role
    ready: bool
    draining: bool
    load: Load
    model: ModelCard
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    refused: _containers.RepeatedCompositeFieldContainer[RefusedPeer]
    version: str
    prefixes: Prefixes
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., model: _Optional[_Union[ModelCard, _Mapping]] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[RefusedPeer, _Mapping]]] = ..., version: _Optional[str] = ..., prefixes: _Optional[_Union[Prefixes, _Mapping]] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...

class RefusedPeer(_message.Message):
    __slots__ = ("address", "node_id", "epoch", "reason", "cause")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    address: str
    node_id: str
    epoch: int
    reason: str
    cause: str
    def __init__(self, address: _Optional[str] = ..., node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("protocol_version", "node_id", "epoch", "fingerprint", "tensor_parallel_size", "block_size", "kv_dtype", "weight_format", "curve_keys")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CURVE_KEYS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node_id: str
    epoch: int
    fingerprint: _containers.ScalarMap[str, str]
    tensor_parallel_size: int
    block_size: int
    kv_dtype: str
    weight_format: str
    curve_keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., tensor_parallel_size: _Optional[int] = ..., block_size: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., weight_format: _Optional[str] = ..., curve_keys: _Optional[_Iterable[str]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("node", "ranks", "lease_seconds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: Introduction
    ranks: _containers.RepeatedCompositeFieldContainer[RankEndpoint]
    lease_seconds: float
    def __init__(self, node: _Optional[_Union[Introduction, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankEndpoint, _Mapping]]] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class RankEndpoint(_message.Message):
    __slots__ = ("rank", "bulk", "control")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BULK_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    rank: int
    bulk: str
    control: str
    def __init__(self, rank: _Optional[int] = ..., bulk: _Optional[str] = ..., control: _Optional[str] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("transfer_id", "attempt", "node_id", "epoch", "peer_epoch", "prompt", "first_token", "end_token", "priority", "cache_salt", "deadline_seconds", "window_bytes", "private", "ranks", "kv_dtype", "resume_at", "mid_stream")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PEER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    RESUME_AT_FIELD_NUMBER: _ClassVar[int]
    MID_STREAM_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    attempt: int
    node_id: str
    epoch: int
    peer_epoch: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    first_token: int
    end_token: int
    priority: int
    cache_salt: str
    deadline_seconds: float
    window_bytes: int
    private: bool
    ranks: int
    kv_dtype: str
    resume_at: int
    mid_stream: bool
    def __init__(self, transfer_id: _Optional[int] = ..., attempt: _Optional[int] = ..., node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., peer_epoch: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., first_token: _Optional[int] = ..., end_token: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., deadline_seconds: _Optional[float] = ..., window_bytes: _Optional[int] = ..., private: _Optional[bool] = ..., ranks: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., resume_at: _Optional[int] = ..., mid_stream: _Optional[bool] = ...) -> None: ...

class OpenEvent(_message.Message):
    __slots__ = ("accepted", "progress", "done", "failed")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    accepted: OpenAccepted
    progress: OpenProgress
    done: OpenDone
    failed: OpenFailed
    def __init__(self, accepted: _Optional[_Union[OpenAccepted, _Mapping]] = ..., progress: _Optional[_Union[OpenProgress, _Mapping]] = ..., done: _Optional[_Union[OpenDone, _Mapping]] = ..., failed: _Optional[_Union[OpenFailed, _Mapping]] = ...) -> None: ...

class OpenAccepted(_message.Message):
    __slots__ = ("queued_tokens",)
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queued_tokens: int
    def __init__(self, queued_tokens: _Optional[int] = ...) -> None: ...

class OpenProgress(_message.Message):
    __slots__ = ("computed_tokens",)
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    def __init__(self, computed_tokens: _Optional[int] = ...) -> None: ...

class OpenDone(_message.Message):
    __slots__ = ("bytes", "compute_seconds", "exposed_seconds", "cached_tokens")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    compute_seconds: float
    exposed_seconds: float
    cached_tokens: int
    def __init__(self, bytes: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., exposed_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class OpenFailed(_message.Message):
    __slots__ = ("reason", "cause")
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    cause: str
    def __init__(self, reason: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class TransferIds(_message.Message):
    __slots__ = ("node_id", "epoch", "ids", "greet_again")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    GREET_AGAIN_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    greet_again: bool
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., greet_again: _Optional[bool] = ...) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("node_id", "epoch")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
