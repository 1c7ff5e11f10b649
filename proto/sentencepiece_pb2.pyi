from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainerSpec(_message.Message):
    __slots__ = ("model_type", "treat_whitespace_as_suffix", "byte_fallback", "bos_piece", "eos_piece", "pad_piece")
    class ModelType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNIGRAM: _ClassVar[TrainerSpec.ModelType]
        BPE: _ClassVar[TrainerSpec.ModelType]
        WORD: _ClassVar[TrainerSpec.ModelType]
        CHAR: _ClassVar[TrainerSpec.ModelType]
    UNIGRAM: TrainerSpec.ModelType
    BPE: TrainerSpec.ModelType
    WORD: TrainerSpec.ModelType
    CHAR: TrainerSpec.ModelType
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    TREAT_WHITESPACE_AS_SUFFIX_FIELD_NUMBER: _ClassVar[int]
    BYTE_FALLBACK_FIELD_NUMBER: _ClassVar[int]
    BOS_PIECE_FIELD_NUMBER: _ClassVar[int]
    EOS_PIECE_FIELD_NUMBER: _ClassVar[int]
    PAD_PIECE_FIELD_NUMBER: _ClassVar[int]
    model_type: TrainerSpec.ModelType
    treat_whitespace_as_suffix: bool
    byte_fallback: bool
    bos_piece: bytes
    eos_piece: bytes
    pad_piece: bytes
    def __init__(self, model_type: _Optional[_Union[TrainerSpec.ModelType, str]] = ..., treat_whitespace_as_suffix: _Optional[bool] = ..., byte_fallback: _Optional[bool] = ..., bos_piece: _Optional[bytes] = ..., eos_piece: _Optional[bytes] = ..., pad_piece: _Optional[bytes] = ...) -> None: ...

class NormalizerSpec(_message.Message):
    __slots__ = ("name", "precompiled_charsmap", "add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRECOMPILED_CHARSMAP_FIELD_NUMBER: _ClassVar[int]
    ADD_DUMMY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    REMOVE_EXTRA_WHITESPACES_FIELD_NUMBER: _ClassVar[int]
    ESCAPE_WHITESPACES_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    precompiled_charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    def __init__(self, name: _Optional[bytes] = ..., precompiled_charsmap: _Optional[bytes] = ..., add_dummy_prefix: _Optional[bool] = ..., remove_extra_whitespaces: _Optional[bool] = ..., escape_whitespaces: _Optional[bool] = ...) -> None: ...

class ModelProto(_message.Message):
    __slots__ = ("pieces", "trainer_spec", "normalizer_spec")
    class SentencePiece(_message.Message):
        __slots__ = ("piece", "score", "type")
        class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
            __slots__ = ()
            NORMAL: _ClassVar[ModelProto.SentencePiece.Type]
            UNKNOWN: _ClassVar[ModelProto.SentencePiece.Type]
            CONTROL: _ClassVar[ModelProto.SentencePiece.Type]
            USER_DEFINED: _ClassVar[ModelProto.SentencePiece.Type]
            UNUSED: _ClassVar[ModelProto.SentencePiece.Type]
            BYTE: _ClassVar[ModelProto.SentencePiece.Type]
        NORMAL: ModelProto.SentencePiece.Type
        UNKNOWN: ModelProto.SentencePiece.Type
        CONTROL: ModelProto.SentencePiece.Type
        USER_DEFINED: ModelProto.SentencePiece.Type
        UNUSED: ModelProto.SentencePiece.Type
        BYTE: ModelProto.SentencePiece.Type
        PIECE_FIELD_NUMBER: _ClassVar[int]
        SCORE_FIELD_NUMBER: _ClassVar[int]
        TYPE_FIELD_NUMBER: _ClassVar[int]
        piece: bytes
        score: float
        type: ModelProto.SentencePiece.Type
        def __init__(self, piece: _Optional[bytes] = ..., score: _Optional[float] = ..., type: _Optional[_Union[ModelProto.SentencePiece.Type, str]] = ...) -> None: ...
    PIECES_FIELD_NUMBER: _ClassVar[int]
    TRAINER_SPEC_FIELD_NUMBER: _ClassVar[int]
    NORMALIZER_SPEC_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[ModelProto.SentencePiece]
    trainer_spec: TrainerSpec
    normalizer_spec: NormalizerSpec
    def __init__(self, pieces: _Optional[_Iterable[_Union[ModelProto.SentencePiece, _Mapping]]] = ..., trainer_spec: _Optional[_Union[TrainerSpec, _Mapping]] = ..., normalizer_spec: _Optional[_Union[NormalizerSpec, _Mapping]] = ...) -> None: ...
