"""What people type for an option means what they meant, or is refused with what would do."""

import contextlib
import inspect
import math
import pathlib

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine import LLM, AsyncLLM, ConfigError, EngineConfig, RequestError, RolloutPolicy, SamplingParams
from rollout_engine.base.errors import WeightUpdateError, did_you_mean, unknown_name
from rollout_engine.base.messages import UpdateOptions
from rollout_engine.base.peer_options import CALL_PEERS, ENGINE_PEERS, SAMPLING_PEERS, SPECULATION_PEERS
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.text.conversations import CHAT_KEYS


def config(**options):
    return EngineConfig(**({"model": "m"} | options))


@pytest.mark.parametrize(
    "field, typed, meant",
    [
        ("stop", "text", ["text"]),
        ("stop", ("a", "b"), ["a", "b"]),
        ("stop", "\U0001f600\\ud800", ["\U0001f600\\ud800"]),
        ("bad_words", "word", ["word"]),
        ("stop_token_ids", 5, [5]),
        ("stop_token_ids", range(3), [0, 1, 2]),
        ("stop_token_ids", np.array([1, 2]), [1, 2]),
        ("stop_token_ids", torch.tensor([3]), [3]),
        ("allowed_token_ids", [np.int64(4), 5], [4, 5]),
        ("logit_bias", {np.int64(5): np.float32(0.5)}, {5: 0.5}),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", torch.tensor(0.5), 0.5),
        ("top_p", np.float64(0.5), 0.5),
        ("max_tokens", np.int64(3), 3),
        ("seed", np.uint64(2**63 + 3), 2**63 + 3),
        ("ignore_eos", np.bool_(True), True),
        ("top_k", -1, 0),
        ("top_k", np.int32(-1), 0),
        ("extra_args", {"a": [np.float32(0.5)]}, {"a": [0.5]}),
    ],
)
def test_a_sampling_setting_means_what_was_meant(field, typed, meant):
    params = SamplingParams(**{field: typed})
    assert getattr(params, field) == meant
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    "options, message",
    [
        ({"speculation": "on"}, "speculation='on' is not allowed: must be 'off', 'auto' or a SpeculationConfig."),
        ({"speculation": True}, "speculation=True is not allowed: must be 'off', 'auto' or a SpeculationConfig."),
        ({"block_size": "big"}, "block_size='big' is not allowed: must be 'auto' or an int."),
        (
            {"speculation": {"sources": ["ngrams"]}},
            "speculation: sources[0]='ngrams' is not allowed: must be one of 'rollouts', 'ngram'.",
        ),
    ],
)
def test_an_option_of_words_beside_other_values_names_them_all(options, message):
    with pytest.raises(ConfigError) as caught:
        config(**options)
    assert str(caught.value) == message


def test_one_source_of_drafts_needs_no_list():
    assert SpeculationConfig(sources="ngram").sources == ("ngram",)


@pytest.mark.parametrize(
    "field, typed, meant",
    [
        ("dtype", torch.bfloat16, "bfloat16"),
        ("dtype", torch.float32, "float32"),
        ("dtype", "torch.float16", "float16"),
        ("dtype", "bf16", "bfloat16"),
        ("dtype", "fp16", "float16"),
        ("dtype", "half", "float16"),
        ("dtype", "fp32", "float32"),
        ("dtype", "float", "float32"),
        ("dtype", np.float32, "float32"),
        ("dtype", np.dtype("float16"), "float16"),
        ("device", torch.device("cpu"), "cpu"),
        ("device", torch.device("cuda", 0), "cuda"),
        ("device", "cuda:0", "cuda"),
        ("max_num_seqs", np.int32(5), 5),
        ("log_interval", np.float32(0.5), 0.5),
        ("deterministic", np.bool_(True), True),
        ("model", pathlib.Path("a", "b"), str(pathlib.Path("a", "b"))),
        ("worker_extensions", "package.module:Class", ("package.module:Class",)),
        ("logits_processors", "package.module:Class", ("package.module:Class",)),
    ],
)
def test_an_engine_option_means_what_was_meant(field, typed, meant):
    assert getattr(config(**{field: typed}), field) == meant


@pytest.mark.parametrize(
    "make, options, message",
    [
        (config, {"dtype": "bf17"}, "dtype='bf17' is not allowed: must be one of 'auto', 'float32', 'bfloat16', 'flo"),
        (config, {"dtype": 16}, "dtype=16 is not allowed: must be one of 'auto', 'float32', 'bfloat16', 'float16'"),
        (config, {"dtype": torch.int8}, "dtype='int8' is not allowed: must be one of"),
        (config, {"device": "cuda:1"}, "device='cuda:1' is not allowed: must be one of 'auto', 'cpu', 'cuda'"),
        (config, {"deterministic": "yes"}, "deterministic='yes' is not allowed: must be one of True, False, 'auto'"),
        (config, {"max_num_seqs": 1.5}, "max_num_seqs=1.5 is not allowed: must be an int, not float."),
        (config, {"max_num_seqs": None}, "max_num_seqs=None is not allowed: must be an int, not None."),
        (config, {"gpu_memory_utilization": 2}, "gpu_memory_utilization=2 is not allowed: must be a number < 1.0."),
        (config, {"worker_extensions": [3]}, "worker_extensions[0]=3 is not allowed: must be a str, not int."),
        (EngineConfig, {}, "EngineConfig: give model=..., it has no default."),
        (config, {"max_model_len": 2**70}, "max_model_len=1180591620717411303424 is not allowed: must be an int <= "),
        (config, {"max_num_seqs": 10**9}, "max_num_seqs=1000000000 is not allowed: must be an int <= 1048576."),
        (config, {"max_num_batched_tokens": 10**9}, "000 is not allowed: must be an int <= 16777216."),
        (config, {"num_threads": 10**5}, "num_threads=100000 is not allowed: must be an int <= 1024."),
        (config, {"stream_interval": 2**60}, "is not allowed: must be an int <= 1125899906842624."),
        (config, {"log_interval": math.inf}, "log_interval=inf is not allowed: must be a number <= 1000000000.0."),
        (config, {"model": "m" * 5_000}, "mm... is not allowed: must be a str of length <= 4096."),
        (config, {"tokenizer": "m" * 5_000}, "mm... is not allowed: must be a str of length <= 4096."),
        (config, {"otlp_traces_endpoint": "http://" + "m" * 5_000}, "must be a str of length <= 4096."),
        (config, {"worker_extensions": ["a:B"] * 65}, "must be a list of length <= 64."),
        (config, {"logits_processors": ["a" * 5_000]}, "must be a str of length <= 4096."),
        (config, {"model": "\ud800"}, r"model='\ud800' is not allowed: must be Unicode text."),
        (SamplingParams, {"stop": ["a", "\ud800"]}, r"stop=['a', '\ud800'] is not allowed: must be Unicode text."),
        (SamplingParams, {"temperature": "\ud800"}, r"temperature='\ud800' is not allowed: must be Unicode text."),
        (SamplingParams, {"logprobs_mode": "x"}, "must be one of 'tempered', 'raw', 'processed'."),
        (SamplingParams, {"max_tokens": "3"}, "max_tokens='3' is not allowed: must be an int or None, not str."),
        (SamplingParams, {"max_tokens": 0}, "max_tokens=0 is not allowed: must be an int >= 1."),
        (SamplingParams, {"stop": ["x", 1]}, "stop[1]=1 is not allowed: must be a str, not int."),
        (SamplingParams, {"stop": 3}, "stop=3 is not allowed: must be a list or None, not int."),
        (SamplingParams, {"logit_bias": {"5": 1.0}}, "must be a dict whose keys are each an int."),
        (SamplingParams, {"logit_bias": {5: "x"}}, "must be a dict whose values are each a number."),
        (SamplingParams, {"top_k": -2}, "top_k=-2 is not allowed: must be an int >= 0."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_what_is_allowed(make, options, message):
    with pytest.raises((ConfigError, RequestError)) as caught:
        make(**options)
    assert message in str(caught.value)


ATOMS = [
    *(None, True, 0, 1, -1, 2**31, 2**63, 2**70, 0.5, math.nan, math.inf, "", "a", "bf16", "x" * 2_000, "\ud800", b"a"),
    *(np.int64(3), np.float32(0.5), np.array([1, 2]), np.array([[1]]), np.array(["a"]), np.empty(0), np.ndarray),
    *(torch.tensor([1, 2]), torch.tensor(0.5), torch.bfloat16, torch.device("cpu"), int, object(), range(3), {1}, 1j),
]
VALUES = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", 1, None]), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=300)
@given(st.sampled_from(SamplingParams.__struct_fields__), st.sampled_from(EngineConfig.__struct_fields__), VALUES)
def test_any_value_of_any_option_is_taken_or_refused_by_its_own_error(setting, option, value):
    with contextlib.suppress(RequestError):
        params = SamplingParams(**{setting: value})
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams).clone() is not None
    with contextlib.suppress(ConfigError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(config(**{option: value})), type=EngineConfig)


def test_a_name_is_suggested_only_where_it_is_close():
    assert unknown_name("option", "temprature", ["temperature", "top_p"]) == (
        "Unknown option 'temprature'. Did you mean 'temperature'?"
    )
    assert (
        unknown_name("option", "heat", ["temperature", "top_p"]) == "Unknown option 'heat'. Known: temperature, top_p."
    )


@pytest.mark.parametrize(
    "make, name, words",
    [
        (config, "enforce_eager", "'enforce_eager' is an option of vLLM's that does not exist here: .*cuda_graphs"),
        (config, "torch_dtype", "Hugging Face's .* give dtype"),
        (config, "mem_fraction_static", "SGLang's .* give gpu_memory_utilization"),
        (SamplingParams, "max_new_tokens", "Hugging Face's .* give max_tokens"),
        (SamplingParams, "best_of", "vLLM's .* give n"),
        (SamplingParams, "max_completion_tokens", "OpenAI's .* give max_tokens"),
        (SamplingParams, "max_model_len", "not an option of SamplingParams: give it to EngineConfig"),
        (config, "temperature", "not an option of EngineConfig: give it to SamplingParams"),
    ],
)  # fmt: skip
def test_a_name_of_another_library_or_class_is_known_for_what_it_is(make, name, words):
    with pytest.raises((ConfigError, RequestError), match=words):
        make(**{name: 1})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"device": "cuda"}, r'speculation=\'auto\' on device="cuda" needs deterministic=True'),
        ({"device": "cuda", "deterministic": False}, "speculation='auto' and deterministic=False are both set"),
        ({"async_scheduling": True}, "speculation='auto' and async_scheduling=True are both set"),
    ],
)
def test_what_cannot_draft_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(model="m", **({"speculation": "auto"} | options))


def test_a_device_that_drafts_schedules_no_step_ahead():
    on_device = {"model": "m", "device": "cuda", "deterministic": True}
    assert EngineConfig(**on_device).schedules_ahead
    assert not EngineConfig(**on_device, speculation="auto").schedules_ahead


@pytest.mark.parametrize(
    "kind, peers",
    [(EngineConfig, ENGINE_PEERS), (SamplingParams, SAMPLING_PEERS), (SpeculationConfig, SPECULATION_PEERS)],
)
def test_names_of_other_libraries_are_not_options_here(kind, peers):
    assert not set(kind.__struct_fields__) & {name for names in peers.values() for name in names}


@pytest.mark.parametrize(
    "name, advice",
    [("mm_processor_cache_gb", "mm_cache_bytes"), ("allowed_local_media_path", "--allow-media-dir")],
)
def test_options_of_vllm_for_pictures_name_ours(name, advice):
    with pytest.raises(ConfigError, match=f"'{name}' is an option of vLLM's.*{advice}"):
        config(**{name: 1})


def test_arguments_of_other_libraries_are_not_arguments_here():
    names = {name for peers in CALL_PEERS.values() for name in peers}
    for verb in (LLM.generate, LLM.chat, AsyncLLM.generate, RolloutPolicy.rollout, RolloutPolicy.arollout):
        assert not names & (set(inspect.signature(verb).parameters) | set(CHAT_KEYS))


def test_options_of_an_update_may_be_numpys():
    assert UpdateOptions.from_values(timeout=np.float32(5), reset_version=np.bool_(True)).timeout == 5.0


@pytest.mark.parametrize("name", ["reset_version", "allow_nonfinite", "partial", "delta", "draft"])
@pytest.mark.parametrize("value", ["auto", 1, None])
def test_switches_of_an_update_are_bools(name, value):
    with pytest.raises(WeightUpdateError, match=rf"^{name}={value!r} is not allowed: must be True or False\.$"):
        UpdateOptions.from_values(**{name: value})


@pytest.mark.parametrize("value", ["9", True, None, 0, math.nan, math.inf])
def test_the_seconds_of_an_update_are_a_number(value):
    with pytest.raises(WeightUpdateError, match=rf"^timeout={value!r} is not allowed: must be seconds in \(0, 1e6\]"):
        UpdateOptions.from_values(timeout=value)


def test_a_clone_has_the_changes_and_is_checked():
    params = SamplingParams(temperature=0.5, stop=["x"])
    assert params.clone() == params
    assert params.clone(n=np.int64(4), stop="y") == SamplingParams(temperature=0.5, stop=["y"], n=4)
    with pytest.raises(RequestError, match="temperature=-1"):
        params.clone(temperature=-1)
    assert config(seed=3).clone(dtype="bf16") == config(seed=3, dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("path", ["lora_name", "lora_path"], "lora_path"),
        ("temp", ["temperature", "top_p"], "temperature"),
        ("lora", ["layout", "lora_request"], "lora_request"),
        ("max", ["max_num_seqs", "max_model_len"], None),
        ("n", ["num_samples"], None),
    ],
)
def test_the_only_name_that_begins_or_ends_so_was_probably_meant(name, known, meant):
    assert did_you_mean(name, known) == (f"Did you mean '{meant}'?" if meant else "")
