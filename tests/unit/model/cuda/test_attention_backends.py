"""Attention by others' kernels, with stand-ins that check every argument and compute what the real ones promise.

Interfaces as of torch 2.13 (`torch.nn.attention.varlen`) and FlashInfer 0.7.2 (`flashinfer.decode`).
"""

import importlib
import inspect
import sys
import types

import pytest
import torch

from rollout_engine import ConfigError, EngineConfig, SamplingParams
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits
from rollout_engine.model.backends import device_of
from rollout_engine.model.cuda.attention_backends import FlashInferAttention, TorchAttention, attention_by
from rollout_engine.model.cuda.attention_trial import check_attention
from rollout_engine.model.modules.geometry import LayerGeometry

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)

DTYPE, BLOCK_SIZE = torch.bfloat16, 16
LAYER = LayerGeometry(4, 2, 32, 32, scale=0.2, sliding_window=None, softcap=None, has_sinks=False)
WINDOW = LayerGeometry(4, 2, 32, 32, scale=0.2, sliding_window=20, softcap=None, has_sinks=False)
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


def attended(q, keys, values, scale, left):
    """The last len(q) tokens of one context: q [T, H, D], keys and values [L, Hk, D]. `left`: keys before a query's
    own; -1: all."""
    group, length = q.shape[1] // keys.shape[1], len(keys)
    position = torch.arange(length - len(q), length)[:, None]
    key = torch.arange(length)[None]
    seen = (key <= position) & ((key >= position - left) if left >= 0 else True)
    k, v = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("thd,lhd->htl", q.float(), k) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v).to(q.dtype)


def assert_same_memory(view, pools):
    assert view.untyped_storage().data_ptr() in {pool.untyped_storage().data_ptr() for pool in pools}


class Calls(list):
    """Calls of a stand-in, and errors that it is told to make."""

    factor = 1.0


@pytest.fixture
def fake_torch(monkeypatch):
    """torch 2.13 with FlashAttention 3 on compute capability 9.0."""
    calls, active = Calls(), []

    def varlen_attn_out(
        out, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
        window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        assert active == ["FA3"] and cu_seq_k is None and return_aux is None and num_splits is None
        num_sequences = len(seqused_k)
        assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
        assert cu_seq_q.shape == (num_sequences + 1,) and cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query)
        assert block_table.shape[0] == num_sequences and block_table.stride(-1) == 1
        assert seqused_k.is_contiguous() and cu_seq_q.is_contiguous()
        assert query.shape == out.shape and query.stride(-1) == out.stride(-1) == 1
        assert key.shape == value.shape and key.shape[1] == BLOCK_SIZE and key.stride(-1) == 1
        assert max_q >= cu_seq_q.diff().max() and max_k >= seqused_k.max()
        assert enable_gqa == (query.shape[1] != key.shape[2]) and window_size[1] == 0
        calls.append((key, value, max_q))
        for index, (start, end) in enumerate(zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)):
            if length := int(seqused_k[index]):
                blocks = block_table[index, : -(-length // BLOCK_SIZE)].long()
                k, v = (pool[blocks].flatten(0, 1)[:length] for pool in (key, value))
                out[start:end] = calls.factor * attended(query[start:end], k, v, scale, window_size[0])

    attention, varlen = types.ModuleType("torch.nn.attention"), types.ModuleType("torch.nn.attention.varlen")
    attention.activate_flash_attention_impl = active.append
    attention.current_flash_attention_impl = lambda: active[-1] if active else None
    varlen.varlen_attn_out = varlen_attn_out
    monkeypatch.setitem(sys.modules, "torch.nn.attention", attention)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    calls.attention, calls.varlen, calls.active = attention, varlen, active
    return calls


@pytest.fixture
def fake_flashinfer(monkeypatch):
    calls = Calls()

    def trtllm_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
        window_left=-1, out=None, kv_layout="HND",
    ):  # fmt: skip
        keys, values = kv_cache
        assert kv_layout == "HND" and keys.shape[2] == values.shape[2] == BLOCK_SIZE and bmm2_scale == 1.0
        assert workspace_buffer.dtype == torch.uint8 and len(workspace_buffer) == 128 << 20
        assert not calls or workspace_buffer[:: 1 << 20].count_nonzero() == 0
        assert query.is_contiguous() and out.is_contiguous() and out.shape == query.shape
        assert len(block_tables) == len(seq_lens) == len(query) and block_tables.is_contiguous()
        assert block_tables.dtype == seq_lens.dtype == torch.int32 and seq_lens.min() >= 1
        assert max_seq_len == block_tables.shape[1] * BLOCK_SIZE >= seq_lens.max()
        calls.append((keys, values, 1))
        for row, length in enumerate(seq_lens.tolist()):
            blocks = block_tables[row, : -(-length // BLOCK_SIZE)].long()
            k, v = (pool[blocks].transpose(1, 2).flatten(0, 1)[:length] for pool in kv_cache)
            out[row] = calls.factor * attended(query[row : row + 1], k, v, bmm1_scale, window_left)[0]

    package, decode = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.decode")
    decode.trtllm_batch_decode_with_kv_cache = trtllm_batch_decode_with_kv_cache
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    return calls


@pytest.fixture(params=["torch", "flashinfer"])
def backend(request):
    """The name, and the calls of its stand-in."""
    return request.param, request.getfixturevalue(f"fake_{request.param}")


def check(name, *layers, dtype=DTYPE, device="cpu", block_size=BLOCK_SIZE):
    check_attention(name, layers, dtype, torch.device(device), block_size)


def test_the_trial_finds_results_that_agree_with_ours(backend, device):
    name, calls = backend
    check(name, LAYER, WINDOW, LAYER, device=device)
    decodes = [rows for *_, rows in calls if rows == 1]
    assert len(decodes) == 2 and len(calls) == (4 if name == "torch" else 2), "each kind of layer once"


def test_the_trial_finds_results_that_do_not(backend, device):
    name, calls = backend
    calls.factor = 1.03
    with pytest.raises(ConfigError, match=f"attention_backend='{name}' is not possible here: its results differ"):
        check(name, LAYER, device=device)


def test_a_kernel_that_fails_is_refused_with_its_reason(backend, device, monkeypatch):
    name, _ = backend

    def plan(self, batch, sliding_windows):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(TorchAttention if name == "torch" else FlashInferAttention, "plan", plan)
    with pytest.raises(ConfigError, match="it fails \\(RuntimeError: no kernel image\\)"):
        check(name, LAYER, device=device)


def test_the_pool_is_read_where_it_lies_and_prefixes_are_not_shared(backend, device):
    name, calls = backend
    heads, limits = Heads(4, 2, 32, 32, DTYPE), Limits(8, 3, 64)
    attention = attention_by(name, heads, limits, device, block_size=BLOCK_SIZE)
    layer = KVLayer(*(torch.randn(5, 2, BLOCK_SIZE, 32).to(device, DTYPE) for _ in range(2)))
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    tables = torch.tensor([[3, 1, 0, 0], [4, 0, 0, 0]], dtype=torch.int32, device=device)
    batch = Batch(starts, torch.tensor([18, 2], dtype=torch.int32, device=device), tables, num_decodes=2)
    wide = torch.randn(2, 8, 32).to(device, DTYPE)
    q, out = wide[:, :4], torch.empty(2, 4, 32, dtype=DTYPE, device=device)  # a view, as a split of one product is
    attention.plan(batch, {0})
    attention.attend(q, layer, LAYER.attention_params, out)
    ((keys, values, _),) = calls
    assert_same_memory(keys, [layer.keys])
    assert_same_memory(values, [layer.values])
    assert attention.prefix_shape is None
    k, v = (pool[[3, 1]].transpose(1, 2).flatten(0, 1)[:18] for pool in layer)
    torch.testing.assert_close(out[:1].cpu(), attended(q[:1].cpu(), k.cpu(), v.cpu(), 0.2, -1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"softcap": 30.0}, "does not cap scores"),
        ({"has_sinks": True}, "knows no sinks"),
        ({"head_dim_v": 16}, "as many channels for keys as for values"),
        ({"head_dim_k": 40, "head_dim_v": 40}, "multiple of 16"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_layers_that_others_do_not_compute_are_refused(backend, change, reason):
    fields = {name: getattr(LAYER, name) for name in LAYER.__struct_fields__}
    with pytest.raises(ConfigError, match=reason):
        check(backend[0], LAYER, LayerGeometry(**(fields | change)))


def test_other_dtypes_devices_and_blocks_are_refused(fake_torch, fake_flashinfer, monkeypatch):
    for name in ("torch", "flashinfer"):
        with pytest.raises(ConfigError, match="the model is in torch.float32"):
            check(name, LAYER, dtype=torch.float32)
    with pytest.raises(ConfigError, match="blocks of 16, 32 or 64 tokens, not block_size=8"):
        check("flashinfer", LAYER, block_size=8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(ConfigError, match="compute capability 9.0, and this device has 10.0"):
        check("torch", LAYER)


def test_a_missing_package_is_named_with_the_command_that_installs_it(fake_torch, fake_flashinfer, monkeypatch):
    def without_fa3(name):
        raise ModuleNotFoundError("No module named 'flash_attn_interface'")

    monkeypatch.setattr(fake_torch.attention, "activate_flash_attention_impl", without_fa3)
    with pytest.raises(ConfigError, match="flash_attn_interface.*`pip install flash-attn-3 --index-url https"):
        check("torch", LAYER)
    monkeypatch.setattr(fake_torch.varlen, "varlen_attn_out", lambda out, query: None)
    with pytest.raises(ConfigError, match='needs torch 2.13 or newer.*`pip install "torch>=2.13"`'):
        check("torch", LAYER)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", None)
    with pytest.raises(ConfigError, match='`pip install "rollout-engine\\[flashinfer\\]"`'):
        check("flashinfer", LAYER)


def test_this_torch_has_the_interface_that_the_stand_in_has(fake_torch):
    """Names and kinds of the parameters; where torch is older, there is nothing to compare with."""
    fake = inspect.signature(fake_torch.varlen.varlen_attn_out).parameters
    for name in ("torch.nn.attention.varlen", "torch.nn.attention"):
        sys.modules.pop(name, None)
    real = importlib.import_module("torch.nn.attention.varlen")
    found = inspect.signature(getattr(real, "varlen_attn_out", lambda: None)).parameters
    if "block_table" not in found:
        pytest.skip("torch is older than 2.13")
    assert {name: each.kind for name, each in found.items()} == {name: each.kind for name, each in fake.items()}


def test_an_installed_flashinfer_has_the_parameters_that_are_given():
    pytest.importorskip("flashinfer")
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    given = "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out"
    assert {*given.split(), "kv_layout"} <= inspect.signature(trtllm_batch_decode_with_kv_cache).parameters.keys()


def test_exact_engines_and_cpus_keep_our_kernels():
    for name in ("torch", "flashinfer"):
        with pytest.raises(ConfigError, match=f"attention_backend='{name}' and deterministic=True are both set"):
            EngineConfig(model="m", device="cuda", attention_backend=name, deterministic=True)
        with pytest.raises(ConfigError, match=f"attention_backend='{name}' is not possible on a CPU"):
            device_of(EngineConfig(model="m", attention_backend=name))
    with pytest.raises(ConfigError, match="attention_backend"):
        EngineConfig(model="m", attention_backend="flash")
    assert EngineConfig(model="m").attention_backend == "ours"


@pytest.mark.slow
def test_an_engine_draws_the_tokens_that_ours_draw(backend, engine_on):
    name, calls = backend
    prompts = [{"prompt_token_ids": ids} for ids in ([7, 8, 9], list(range(40, 62)))]
    ours, theirs = (
        engine_on("device", dtype="bfloat16", attention_backend=each, deterministic=False, block_size=BLOCK_SIZE)
        for each in ("ours", name)
    )
    calls.clear()
    tokens = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        for llm in (ours, theirs)
    ]
    assert tokens[0] == tokens[1] and len(calls) >= 4
    assert f"attention {name}" in theirs.frontend.client.driver.executor.worker.backend.choices
