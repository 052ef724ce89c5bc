"""The numerics contract on a device: ordered engines and exact trainers agree bit for bit, and trainers learn."""

import copy

import msgspec
import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from rollout_engine import SamplingParams, exact
from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.triton import tiling
from rollout_engine.model.cuda import runner
from rollout_engine.testing import tiny_model
from rollout_engine.testing.models import tiny_checkpoint

# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)

LONG = [(7 * i) % 250 + 3 for i in range(18)]
SHORT = LONG[:13]
DRAWN = SamplingParams(temperature=0.8, top_k=20, max_tokens=4, logprobs=0, n=2, seed=3, ignore_eos=True)
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OPTIONS = {"deterministic": True, "max_model_len": 32, "block_size": 4}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A function from an architecture to a checkpoint of it, as small as can be."""

    def get(architecture):
        sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64} | EXPERTS
        return tiny_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **sizes)

    return get


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Two of attention's to a short context, a tile each; a group shares whole ones."""
    monkeypatch.setattr(tiling, "_DETERMINISTIC_UNIT", 16)
    monkeypatch.setattr(tiling, "_tile", lambda *_: 16)


def run(llm, *prompts, params=DRAWN):
    """(prompt, tokens, log-probs) of every completion."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert not [c.error for output in outputs for c in output.outputs if c.error]
    return [(o.prompt_token_ids, list(c.token_ids), np.array(c.logprobs)) for o in outputs for c in o.outputs]


def assert_those_of(trainer, completions, temperature=DRAWN.temperature):
    """Log-probs are the trainer's, bit for bit."""
    device = next(trainer.parameters()).device
    sequences = [torch.tensor(prompt + tokens) for prompt, tokens, _ in completions]
    ids = pad_sequence(sequences, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(sequence) for sequence in sequences])[:, None]
    with torch.no_grad():
        theirs = exact.token_logprobs(trainer, ids.to(device), mask.to(device), temperature=temperature).cpu().numpy()
    for row, (prompt, tokens, logprobs) in zip(theirs, completions, strict=True):
        np.testing.assert_array_equal(logprobs, row[len(prompt) - 1 :][: len(tokens)])


@pytest.mark.slow
def test_logprobs_of_chunks_groups_prefix_hits_and_preempted_samples_are_the_trainers(
    engine_on, trainer_of, monkeypatch
):
    seen, find = [], runner.shared_prefixes

    def found(*args, **kwargs):
        seen.append(find(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(runner, "shared_prefixes", found)
    llm = engine_on("device", dtype="bfloat16", num_kv_blocks=9, **OPTIONS)
    first = run(llm, LONG, SHORT)
    again = run(llm, LONG, params=msgspec.structs.replace(DRAWN, max_tokens=2))
    assert any(each.units.any() for each in seen)
    assert llm.llm_engine.stats.num_preemptions > 0
    assert [tokens for _, tokens, _ in again] == [tokens[:2] for _, tokens, _ in first[:2]]
    assert_those_of(trainer_of("qwen3", "bfloat16"), first + again)


@pytest.mark.slow
def test_logprobs_of_prompts_and_of_tokens_drawn_on_the_host_are_the_trainers(engine_on, trainer_of):
    llm, trainer = engine_on("device", dtype="bfloat16", num_kv_blocks=9, **OPTIONS), trainer_of("qwen3", "bfloat16")
    params = SamplingParams(
        temperature=0.8, max_tokens=2, logprobs=0, prompt_logprobs=1, presence_penalty=1.0, seed=3, ignore_eos=True
    )
    (output,) = llm.generate([{"prompt_token_ids": SHORT}], params, use_tqdm=False)
    (sample,) = output.outputs
    told = np.concatenate([output.prompt_logprobs[1:], sample.logprobs])
    ids = torch.tensor([SHORT + list(sample.token_ids)], device=next(trainer.parameters()).device)
    with torch.no_grad():
        np.testing.assert_array_equal(told, exact.token_logprobs(trainer, ids, temperature=0.8)[0].cpu().numpy())
        logits = trainer(ids).logits[0].cpu().double().numpy()
    order = np.argsort(-logits, axis=1, kind="stable")
    places = [int(np.flatnonzero(row == token)[0]) + 1 for row, token in zip(order, SHORT[1:], strict=False)]
    assert output.prompt_ranks.tolist() == [0, *places]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *(("qwen3", "float32"), ("qwen2", "bfloat16"), ("llama", "float32"), ("llama", "bfloat16")),
        *(("qwen3_moe", "bfloat16"), ("qwen3_moe", "float32"), ("mixtral", "bfloat16")),
    ],
)
def test_logprobs_are_the_trainers_in_other_shapes(engine_on, trainer_of, architecture, dtype):
    llm = engine_on("device", architecture, dtype=dtype, **OPTIONS)
    assert_those_of(trainer_of(architecture, dtype), run(llm, LONG, SHORT, [7, 8, 9]))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.slow
def test_values_and_gradients_are_those_of_eager_attention_and_plain_linears(enable, device, architecture):
    reference = tiny_model(architecture, attn_implementation="eager", **EXPERTS).requires_grad_(True).to(device)
    trainer = enable(copy.deepcopy(reference))
    ids = torch.randint(3, 259, (2, 11), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.arange(11, device=device) < torch.tensor([11, 6], device=device)[:, None]
    weights = torch.randn(2, 10, generator=torch.Generator().manual_seed(1)).to(device)
    ours = exact.token_logprobs(trainer, ids, mask, temperature=0.7)
    logits = reference(input_ids=ids, attention_mask=mask.long()).logits[:, :-1] / 0.7
    theirs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:]
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    for (name, p), (_, q) in zip(reference.named_parameters(), trainer.named_parameters(), strict=True):
        assert (p.grad - q.grad).norm() / p.grad.norm() < 1e-4, name


@pytest.mark.slow
def test_training_in_bfloat16_lowers_the_loss(enable, device):
    model = enable(tiny_model("qwen3", dtype=torch.bfloat16, num_hidden_layers=1)).requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids = torch.randint(3, 259, (1, 9), generator=torch.Generator().manual_seed(0)).to(device)
    losses = []
    for _ in range(4):
        loss = -exact.token_logprobs(model, ids).mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_names_stay_and_enabling_again_is_harmless(enable):
    model = tiny_model("qwen3")
    names = list(model.state_dict())
    assert list(enable(enable(model)).state_dict()) == names


def test_rotary_frequencies_are_those_that_engines_have(enable):
    """A device's powers differ from the CPU's in the last bit."""
    model = tiny_model("qwen3")
    expected = model.model.rotary_emb.inv_freq.clone()
    model.model.rotary_emb.inv_freq.mul_(1 + 2**-22)
    assert torch.equal(enable(model).model.rotary_emb.inv_freq.cpu(), expected)


@pytest.mark.slow
def test_products_that_would_round_positions_are_refused_by_trainer_and_engine(enable, engine_on):
    trainer = enable(tiny_model("llama", num_hidden_layers=1))
    ids = torch.tensor([[5, 6, 7]], device=next(trainer.parameters()).device)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ConfigError, match="rounds rotary positions"):
            exact.token_logprobs(trainer, ids)
        with pytest.raises(ConfigError, match="deterministic=True is not possible.*rounds rotary positions"):
            engine_on("device", "llama", num_kv_blocks=13, **OPTIONS)
    finally:
        torch.set_float32_matmul_precision("highest")
    exact.token_logprobs(trainer, ids)


def test_a_model_with_weights_that_no_kernel_serves_is_refused(enable):
    with pytest.raises(ConfigError, match="cannot be exact.*c_attn"):
        enable(tiny_model("gpt2", n_embd=48, n_head=3, n_layer=1))


def test_an_engine_whose_trainer_would_compute_other_bits_is_refused(engine_on, monkeypatch):
    monkeypatch.setattr("rollout_engine.model.cuda.gradients.rms_norm", lambda x, *_: x)
    with pytest.raises(ConfigError, match="not bit for bit those that its modules give a trainer"):
        engine_on("device", "llama", num_kv_blocks=12, **OPTIONS)
