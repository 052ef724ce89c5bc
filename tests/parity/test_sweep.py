"""Every causal LM that transformers has: served right, or refused with a reason. Never served wrong, never a traceback.

Each type is made tiny with one generic recipe; a type that transformers itself does not build from it is skipped.
"""

import copy
import random

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollout_engine import LLM, SamplingParams
from rollout_engine.base.errors import ConfigError
from rollout_engine.testing import byte_tokenizer
from tests.models import results
from tests.models.recipe import random_model, tiny_models

_ROWS = results.read()
SERVED = set(results.names_of(_ROWS, "type", *results.SERVED))
REFUSED = set(results.names_of(_ROWS, "type", "refused", "untried"))
"""As docs/models.md lists them, so that a change which serves or refuses other types is seen."""

SCALED = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=48, llama_4_scaling_beta=0.3)


def draw_prompts(seed):
    """Different lengths, past the windows and original lengths; the last continues another one."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in (1, 9, 31, 70, 40)]
    return [*prompts, prompts[3][:64] + [9, 8]]


def with_scaled_positions(model, directory):
    """A model like it whose rotary embeddings, and queries where it scales them, are others from position 48 on.

    None if it has no such embeddings, or transformers does not build or save it.
    """
    config = copy.deepcopy(model.config)
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return None
    is_by_kind = all(isinstance(each, dict) for each in rope.values())
    config.rope_parameters = {k: each | SCALED for k, each in rope.items()} if is_by_kind else rope | SCALED
    try:
        made = random_model(config)
        made.save_pretrained(directory)
    except Exception:  # whatever transformers does with a configuration that does not fit
        return None
    return made


@torch.no_grad()
def assert_right(directory, outputs):
    """Log-probs, and the choice of each token, are those of one eager forward."""
    reference = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    for output in outputs:
        sample = output.outputs[0]
        tokens = torch.tensor([output.prompt_token_ids + sample.token_ids])
        logits = reference(tokens, use_cache=False).logits[0, len(output.prompt_token_ids) - 1 : -1].float()
        allowed = 1e-4 * max(1.0, float(logits.abs().max()))
        chosen = torch.tensor(sample.token_ids)[:, None]
        assert (logits.amax(-1) - logits.gather(1, chosen)[:, 0]).max() < allowed
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        torch.testing.assert_close(torch.from_numpy(sample.logprobs), expected, atol=allowed, rtol=0)


PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
SMALL = dict(max_num_batched_tokens=33, num_kv_blocks=16, block_size=16, max_model_len=128, num_threads=1)


def serve(model, directory, seed):
    """Outputs of an engine that serves `model`. Raises `ConfigError`."""
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    with LLM(str(directory), dtype="float32", log_stats=False, **SMALL) as llm:
        return llm.generate(draw_prompts(seed), PARAMS, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # transformers' own, about sizes that no real checkpoint has
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_it_is_served_right_or_refused_with_the_reason(model_type, tmp_path):
    refusals = []
    for i, model in enumerate(tiny_models(model_type)):
        directory = tmp_path / str(i)
        try:
            outputs = serve(model, directory, model_type)
        except ConfigError as refusal:
            refusals.append(str(refusal))
            continue
        assert_right(directory, outputs)
        assert model_type not in REFUSED, f"run `python -m tests.models {model_type}`"
        return
    assert model_type not in SERVED, refusals
    if not refusals:
        pytest.skip("transformers builds no tiny model from the generic recipe")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model_type", sorted(SERVED))
def test_it_is_served_right_beyond_the_original_length(model_type, tmp_path):
    for i, model in enumerate(tiny_models(model_type)):
        directory = tmp_path / str(i)
        if (scaled := with_scaled_positions(model, directory)) is None:
            continue
        try:
            outputs = serve(scaled, directory, model_type)
        except ConfigError:
            continue
        assert_right(directory, outputs)
        return
    pytest.skip("no tiny model has such rotary embeddings")
