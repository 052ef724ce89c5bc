"""Whatever would make a trainer's log-probs differ from the engine's is refused, or warned of once."""

import copy
import logging

import pytest
import torch
from torch import nn

from rollout_engine import exact
from rollout_engine.base.errors import ConfigError
from rollout_engine.testing import tiny_model

IDS = torch.randint(3, 259, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def trainer():
    return exact.enable(tiny_model("qwen3"))


def test_dropout_in_training_is_refused_by_its_name():
    trainer = exact.enable(tiny_model("gpt_neox", hidden_dropout=0.1))
    trainer.eval()
    exact.token_logprobs(trainer, IDS)
    trainer.train()
    with pytest.raises(ConfigError, match=r"dropped activations at random.*hidden_dropout=0.1.*eval\(\)"):
        exact.token_logprobs(trainer, IDS)


def test_dropout_of_attention_is_refused():
    trainer = exact.enable(tiny_model("llama", attention_dropout=0.2)).train()
    with pytest.raises(ConfigError, match=r"attention weights at random \(p=0.2\).*attention_dropout=0.0"):
        exact.token_logprobs(trainer, IDS)


def test_training_mode_without_dropout_is_exact(trainer):
    expected = exact.token_logprobs(trainer.eval(), IDS)
    assert torch.equal(exact.token_logprobs(trainer.train(), IDS), expected)


def test_noise_on_embeddings_is_said_once(caplog):
    trainer = exact.enable(tiny_model("qwen3"))
    trainer.model.embed_tokens.register_forward_hook(lambda module, args, out: out + 0.01 * torch.randn_like(out))
    with caplog.at_level(logging.WARNING, "rollout_engine"):
        for _ in range(2):
            exact.token_logprobs(trainer, IDS)
    assert caplog.text.count("drew random numbers") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_refused(dtype):
    trainer = exact.enable(tiny_model("qwen3", dtype=dtype))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="under autocast to torch.bfloat16"):
        exact.token_logprobs(trainer, IDS)
    exact.token_logprobs(trainer, IDS)


def test_a_compiled_exact_model_is_refused(trainer):
    wrapped = torch.compile(trainer, backend="eager")
    with pytest.raises(ConfigError, match="given to torch.compile"):
        wrapped(input_ids=IDS, use_cache=False)
    exact.token_logprobs(trainer, IDS)


def test_float16_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"'.*weight' is torch.float16.*dtype=torch.bfloat16"):
        exact.enable(tiny_model("llama", dtype=torch.float16))


def test_a_cached_step_is_refused(trainer):
    first = trainer(input_ids=IDS, use_cache=True)
    with pytest.raises(ConfigError, match="1 queries for 13 keys.*use_cache=False"):
        trainer(input_ids=IDS[:, :1], past_key_values=first.past_key_values, use_cache=True)


def test_wrong_rows_are_refused_when_the_decoder_itself_is_called(trainer):
    mask = torch.tensor([[0] * 3 + [1] * 9, [1] * 12])
    with pytest.raises(ValueError, match="right-padded"):
        trainer.model(input_ids=IDS, attention_mask=mask, use_cache=False)
    with pytest.raises(ValueError, match="right-padded"):
        trainer.model(IDS, mask)


def test_what_wraps_a_model_is_told_to_come_after(trainer):
    class Wrapper(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.module = model

        def forward(self, **arguments):
            return self.module(**arguments)

    with pytest.raises(ConfigError, match="not Wrapper. Enable the model before it is wrapped"):
        exact.enable(Wrapper(trainer))
    assert torch.equal(exact.token_logprobs(Wrapper(trainer), IDS), exact.token_logprobs(trainer, IDS))


class Adapted(nn.Module):
    """A linear with an adapter, as PEFT has them."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.merged, self.disable_adapters = base, False, False
        self.lora_a = nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        out = self.base_layer(x)
        return out if self.merged else out + self.lora_b(self.lora_a(x))


def test_an_adapter_that_is_not_merged_is_said_once(caplog):
    trainer = exact.enable(tiny_model("qwen3"))
    attention = trainer.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    with caplog.at_level(logging.WARNING, "rollout_engine"):
        attention.q_proj.merged = True
        exact.token_logprobs(trainer, IDS)
        assert not caplog.records
        attention.q_proj.merged = False
        for _ in range(2):
            exact.token_logprobs(trainer, IDS)
    assert caplog.text.count("'layers.0.self_attn.q_proj' has an adapter that is not merged") == 1


def test_checks_survive_a_copy(trainer):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast"):
        exact.token_logprobs(copy.deepcopy(trainer), IDS)
