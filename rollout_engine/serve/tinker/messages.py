"""Messages of Tinker that are Protocol Buffers: results of samples and of passes, and the request of a pass.

Numbers of fields, from the descriptors that Tinker's SDK has:

SampleResponse         1 sequences, 2 prompt_logprobs, 3 topk_prompt_logprobs, 4 prompt_cache_hit_tokens
SampledSequence        1 stop_reason (0 stop, 1 length), 2 tokens, 3 logprobs, 4 topk_sampled_logprobs
TopkLogprobs           1 token_ids, 2 logprobs, 3 k, 4 length
ForwardBackwardRequest 1 model_id, 2 seq_id, 3 data, 4 loss_fn, 5 loss_fn_config, 6 forward_only, 7 loss_fn_config_v2
Datum                  1 model_input, 2 loss_fn_inputs     (3 and 4: the sample of each token)
Tensor                 1 dense, 2 sparse_csr, 3 dtype (1 float32, 2 int64), 4 shape
ForwardBackwardOutput  1 loss_fn_output_type, 2 loss_fn_outputs, 3 metrics
ArrayRecord            1 type_tag, 2 fields, 3 num_datums
BatchedTensor          1 data, 2 offsets (int64, in bytes), 3 dtype, 4 trailing_shape

Arrays are little-endian bytes: ids int32, log-probs float32.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_training import TrainingExample
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.tinker.protobuf import (
    bytes_field,
    double_field,
    number_field,
    read_double,
    read_message,
    read_varints,
)

PROTOBUF = "application/x-protobuf"
_MASKED = np.float32(-99999.0)
"""Log-prob that stands for none in a matrix of the most likely tokens, next to id 0."""
_FLOAT32 = 1
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8")}
_DTYPE_NAMES = {1: "float32", 2: "int64"}
_TARGETS = "target_tokens"


class PassRequest(msgspec.Struct):
    """A request of a pass over examples."""

    model_id: str = ""
    seq_id: int = 0
    loss_fn: str = ""
    config: dict[str, float] = {}
    forward_only: bool = False
    examples: list[TrainingExample] = []


def sample_message(output: RequestOutput, num_scored: int | None = None) -> bytes:
    """A finished request as a SampleResponse. `num_scored`: tokens at the prompt's end with log-probs; None: all."""
    parts = [bytes_field(1, _write_sequence(sample)) for sample in output.outputs]
    if output.prompt_logprobs is not None:
        first = 0 if num_scored is None else len(output.prompt_token_ids) - num_scored
        own = output.prompt_logprobs.astype("<f4", copy=True)
        own[:first] = np.nan
        parts.append(bytes_field(2, own.tobytes()))
        if output.prompt_top_logprobs is not None:
            parts.append(bytes_field(3, _write_likeliest(*output.prompt_top_logprobs, first=first)))
    parts.append(number_field(4, output.num_cached_tokens))
    return b"".join(parts)


def _write_sequence(sample: CompletionOutput) -> bytes:
    parts = [
        number_field(1, int(sample.finish_reason == "length")),
        bytes_field(2, np.array(sample.token_ids, "<i4").tobytes()),
    ]
    if sample.logprobs is not None:
        parts.append(bytes_field(3, sample.logprobs.astype("<f4").tobytes()))
    if sample.top_logprobs is not None:
        parts.append(bytes_field(4, _write_likeliest(*sample.top_logprobs)))
    return b"".join(parts)


def _write_likeliest(ids: np.ndarray, logprobs: np.ndarray, first: int = 0) -> bytes:
    """Ids int32 [T, k] and log-probs float32 [T, k] as TopkLogprobs. Rows before `first` are masked."""
    is_none = ids < 0
    is_none[:first] = True
    ids, logprobs = np.where(is_none, 0, ids), np.where(is_none, _MASKED, logprobs)
    length, k = ids.shape
    arrays = bytes_field(1, ids.astype("<i4").tobytes()) + bytes_field(2, logprobs.astype("<f4").tobytes())
    return arrays + number_field(3, k) + number_field(4, length)


def pass_message(arrays: Mapping[str, Sequence[np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """The result of a pass as a ForwardBackwardOutput: float32 [T] of each example, by name, and metrics."""
    fields = b"".join(
        bytes_field(2, bytes_field(1, name.encode()) + bytes_field(2, _batch_arrays(each)))
        for name, each in arrays.items()
    )
    num_examples = len(next(iter(arrays.values())))
    kind = bytes_field(1, b"TensorRecord")
    entries = [bytes_field(3, bytes_field(1, k.encode()) + double_field(2, v)) for k, v in metrics.items()]
    return kind + bytes_field(2, kind + fields + number_field(3, num_examples)) + b"".join(entries)


def _batch_arrays(arrays: Sequence[np.ndarray]) -> bytes:
    ends = np.cumsum([0, *(4 * each.size for each in arrays)], dtype="<i8")
    data = np.concatenate(arrays).astype("<f4").tobytes()
    return bytes_field(1, data) + bytes_field(2, ends.tobytes()) + number_field(3, _FLOAT32)


def read_pass(data: bytes) -> PassRequest:
    """Read a ForwardBackwardRequest. Raises `HttpProblem` 400 for other bytes, and `RequestError` by the field."""
    try:
        return _read_pass(data)
    except RequestError:
        raise
    except ValueError as problem:
        what = f"The body is no ForwardBackwardRequest of Tinker ({problem})"
        raise HttpProblem(400, f"{what}: send one with 'Content-Type: {PROTOBUF}', as Tinker's SDK does.") from None


def model_of_pass(data: bytes) -> str:
    """The model of a ForwardBackwardRequest that `read_pass` has refused by a field."""
    return next((_text(value) for number, value in read_message(memoryview(data)) if number == 1), "")


def _read_pass(data: bytes) -> PassRequest:
    found, config = PassRequest(config={}, examples=[]), {}
    for number, value in read_message(memoryview(data)):
        if number == 1:
            found.model_id = _text(value)
        elif number == 2:
            found.seq_id = _integer(value)
        elif number == 3:
            found.examples.append(_read_example(_bytes(value), f"data[{len(found.examples)}]"))
        elif number == 4:
            found.loss_fn = _text(value)
        elif number == 6:
            found.forward_only = bool(_integer(value))
        elif number in (5, 7):
            name, each = _read_entry(_bytes(value))
            config[name] = read_double(each) if number == 5 else _read_number(name, each)
    found.config = config
    return found


def _read_number(name: str, value: memoryview) -> float:
    """The number of a LossConfigValue. Raises `RequestError` for a text."""
    for number, each in read_message(value):
        if number == 1:
            return read_double(_bytes(each))
        if number == 2:
            raise RequestError.for_field(f"loss_fn_config['{name}']", _text(each), "a number")
    return 0.0


def _read_example(data: memoryview, where: str) -> TrainingExample:
    tokens: list[np.ndarray] = []
    inputs: dict[str, np.ndarray] = {}
    for number, value in read_message(data):
        if number == 1:
            tokens.append(_read_chunk(_bytes(value), f"{where}.model_input.chunks[{len(tokens)}]"))
        elif number == 2:
            name, tensor = _read_entry(_bytes(value))
            inputs[name] = _read_tensor(tensor, f"{where}.loss_fn_inputs['{name}']", is_ids=name == _TARGETS)
    ids = np.concatenate(tokens).astype(np.int64) if tokens else np.zeros(0, np.int64)
    if not len(ids):
        raise RequestError.for_field(f"{where}.model_input", "no tokens", "at least one token id")
    for name, array in inputs.items():
        if array.shape != ids.shape:
            bound = f"[{len(ids)}], one for each token of model_input"
            raise RequestError.for_field(f"{where}.loss_fn_inputs['{name}']", f"shape {list(array.shape)}", bound)
    return TrainingExample(ids, inputs)


def _read_chunk(data: memoryview, where: str) -> np.ndarray:
    for number, value in read_message(data):
        if number != 1:
            raise RequestError.for_field(where, "an image or audio", "encoded_text: token ids alone are trained on")
        for inner, tokens in read_message(_bytes(value)):
            if inner == 1:
                return _array(_bytes(tokens), np.dtype("<i4"), where)
    return np.zeros(0, np.int32)


def _read_tensor(data: memoryview, where: str, *, is_ids: bool) -> np.ndarray:
    """A dense tensor as int64 if it `is_ids`, else as float32, [T] or more dimensions."""
    dense, dtype, shape = memoryview(b""), 0, list[int]()
    for number, value in read_message(data):
        if number == 1:
            dense = _bytes(value)
        elif number == 2:
            raise RequestError.for_field(where, "a sparse tensor", "a dense one, with one value for each token")
        elif number == 3:
            dtype = _integer(value)
        elif number == 4:
            shape += read_varints(value)
    if dtype not in _DTYPES or (is_ids and dtype != 2):
        shown = _DTYPE_NAMES.get(dtype, f"dtype {dtype}")
        raise RequestError.for_field(where, shown, "int64" if is_ids else "float32 or int64")
    array = _array(dense, _DTYPES[dtype], where)
    if shape and math.prod(shape) != array.size:
        raise RequestError.for_field(where, f"{array.size} values", f"as many as its shape {shape} has")
    array = array if is_ids else array.astype(np.float32)
    return array.reshape(shape) if shape else array


def _array(data: memoryview, dtype: np.dtype[Any], where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise RequestError.for_field(
            where, f"{len(data)} bytes", f"a multiple of {dtype.itemsize}, as {dtype.name} has"
        )
    return np.frombuffer(data, dtype).copy()


def _read_entry(data: memoryview) -> tuple[str, memoryview]:
    """An entry of a map: its key, and the bytes of its value."""
    key, value = "", memoryview(b"")
    for number, each in read_message(data):
        if number == 1:
            key = _text(each)
        elif number == 2:
            value = _bytes(each)
    return key, value


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("expected bytes, got an integer")
    return value


def _text(value: int | memoryview) -> str:
    return str(_bytes(value), "utf-8")


def _integer(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError("expected an integer, got bytes")
    return value
