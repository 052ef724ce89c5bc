"""Ranks on devices that split sums: two exchanges a layer, log-probs of one device but for rounding, exact weights.

The devices are the host's memory through Triton's interpreter, connected by gloo.
"""

import msgspec
import numpy as np
import pytest

from rollout_engine.execution import process_executor
from rollout_engine.model.ranks.group_exchange import GroupExchange
from rollout_engine.testing import random_adapter, tiny_model
from tests.integration.test_remote_ranks import Elsewhere
from tests.unit.model.cuda.test_ranks import (  # noqa: F401
    DRAWN,
    EXPERTS,
    PROMPTS,
    SMALL,
    engine,
    executor_of,
    pytestmark,
)

FAST = {"deterministic": "auto"}
ODD = dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=84, intermediate_size=75, vocab_size=301)


def require_close(many, one, *, atol=2e-4, **request):
    """Both say the same, but for rounding."""
    found, expected = (llm.generate(PROMPTS, DRAWN, use_tqdm=False, **request) for llm in (many, one))
    for mine, other in zip(found, expected, strict=True):
        for a, b in zip(mine.outputs, other.outputs, strict=True):
            assert list(a.token_ids) == list(b.token_ids)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol)
    scores = [llm.score([[5, 9, 2], [7]], [[4, 5], [8]]) for llm in (many, one)]
    for a, b in zip(*scores, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


def count_exchanges(monkeypatch):
    """A list of the kinds of exchange that engines take part in which this process makes from now on."""
    seen = []
    for kind in ("gather", "add_up", "merge_rows"):
        plain = getattr(GroupExchange, kind)
        monkeypatch.setattr(
            GroupExchange, kind, lambda self, *args, kind=kind, plain=plain: seen.append(kind) or plain(self, *args)
        )
    return seen


def say_a_token(llm, seen):
    """Generate one token, with nothing `seen` before."""
    seen.clear()
    llm.generate([PROMPTS[0]], msgspec.structs.replace(DRAWN, n=1, max_tokens=1), use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "fields", "num_ranks"),
    [
        ("qwen3", SMALL, 2),
        ("llama", ODD, 3),
        ("qwen2", SMALL | {"num_key_value_heads": 1, "intermediate_size": 50}, 2),
        ("mixtral", SMALL | EXPERTS, 2),
    ],
)
def test_ranks_say_what_one_device_says_but_for_rounding(engine, architecture, fields, num_ranks):  # noqa: F811
    many, one = (engine(n, architecture, fields, **FAST) for n in (num_ranks, 1))
    require_close(many, one)
    source = tiny_model(architecture, seed=5, **fields)
    for staging in ("shadow", "inplace"):
        updates = [llm.update_weights(source, staging=staging).digest for llm in (many, one)]
        assert updates[0] == updates[1]
        require_close(many, one)
        source = tiny_model(architecture, seed=6, **fields)


@pytest.mark.slow
def test_a_step_has_two_exchanges_a_layer_and_two_for_tokens(monkeypatch, engine):  # noqa: F811
    fields = SMALL | {"num_hidden_layers": 3}
    seen = count_exchanges(monkeypatch)
    say_a_token(engine(2, fields=fields, **FAST), seen)
    assert seen == ["merge_rows"] + ["add_up"] * 6 + ["gather"]  # embedding, layers, logits


@pytest.mark.slow
def test_experts_are_weighted_before_they_are_added_up(monkeypatch, engine):  # noqa: F811
    seen = count_exchanges(monkeypatch)
    say_a_token(engine(2, "qwen3_moe", fields=SMALL | EXPERTS, **FAST), seen)
    assert seen == ["merge_rows", "add_up", "add_up", "gather"]


@pytest.mark.slow
def test_a_product_with_a_bias_is_cut_by_its_outputs(engine):  # noqa: F811
    fields = SMALL | {"attention_bias": True, "mlp_bias": True}
    two, one = (engine(n, "llama", fields, **FAST) for n in (2, 1))
    source = tiny_model("llama", seed=5, **fields)
    assert two.update_weights(source).digest == one.update_weights(source).digest
    require_close(two, one)
    (layer,) = executor_of(two).worker.runner.model.decoder._parts.layers
    assert layer.out.joins.input is not None and layer.mlp.down.joins.input is not None


@pytest.mark.slow
def test_sums_of_bfloat16_are_split(engine):  # noqa: F811
    two, one = (engine(n, fields=SMALL, dtype="bfloat16", **FAST) for n in (2, 1))
    for mine, other in zip(*(llm.score([[5, 9, 2]], [[4, 5, 6]]) for llm in (two, one)), strict=True):
        np.testing.assert_allclose(mine, other, atol=0.1)
    source = tiny_model("qwen3", seed=5, **SMALL)
    assert two.update_weights(source).digest == one.update_weights(source).digest


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_adapters_are_cut_by_inputs_too(engine, num_ranks):  # noqa: F811
    many, one = (engine(n, "llama", ODD | {"num_key_value_heads": 6}, max_loras=2, **FAST) for n in (num_ranks, 1))
    for revision in range(2):
        adapter = random_adapter(
            tiny_model("llama", **ODD | {"num_key_value_heads": 6}), "a", seed=3 + revision, revision=revision
        )
        for llm in (many, one):
            llm.add_lora(adapter)
        assert many.list_loras()[0].digest == one.list_loras()[0].digest
        require_close(many, one, lora_request=["a", None])


@pytest.mark.slow
def test_weights_pass_between_hosts_that_share_no_memory(engine, monkeypatch):  # noqa: F811
    one = engine(1, fields=SMALL, **FAST)
    monkeypatch.setattr(process_executor, "_launcher_of", lambda config, _: Elsewhere(config.tensor_parallel_size))
    two = engine(2, fields=SMALL, **FAST)
    source = tiny_model("qwen3", seed=5, **SMALL)
    assert two.update_weights(source, staging="inplace").digest == one.update_weights(source).digest
    require_close(two, one)
