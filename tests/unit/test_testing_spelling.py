import pytest
import torch

from rollout_engine.testing import spelled_token, spelling_state_dict, tiny_model

PROMPTS = [[1], [5, 5, 5, 5], [7, 8, 9, 10, 11, 12], [3] * 40 + [8], list(range(3, 250))]
MIXED_PROMPT = torch.tensor([[7, 8, 9, 10, 12, 15, 16, 21, 20, 2, 30, 31]])
ARCHITECTURES = pytest.mark.parametrize(
    ("architecture", "tied", "dtype"),
    [
        pytest.param("llama", False, torch.float32, marks=pytest.mark.slow),
        ("llama", True, torch.bfloat16),
        ("qwen2", False, torch.bfloat16),
        pytest.param("qwen2", True, torch.float32, marks=pytest.mark.slow),
        ("qwen3", False, torch.float32),
        pytest.param("qwen3", True, torch.bfloat16, marks=pytest.mark.slow),
    ],
)


@pytest.mark.quick(1)
@ARCHITECTURES
def test_every_position_of_every_prompt_says_the_version(architecture, tied, dtype):
    model = tiny_model(architecture, tie_word_embeddings=tied, dtype=dtype)
    for version in (*range(51), 250, 251, 10**12):
        model.load_state_dict(spelling_state_dict(model, version))
        for prompt in PROMPTS if version < 5 else PROMPTS[1:3]:
            said = model(torch.tensor([prompt])).logits[0].argmax(-1)
            assert said.tolist() == [spelled_token(version)] * len(prompt), (version, prompt[:10])


@pytest.mark.quick(1)
@ARCHITECTURES
def test_one_parameter_of_another_version_makes_it_say_something_else(architecture, tied, dtype):
    model = tiny_model(architecture, tie_word_embeddings=tied, dtype=dtype)
    names = [name for name, _ in model.named_parameters()]
    seen, tries = dict.fromkeys(names, 0), 8
    for version in range(tries):
        old, new = spelling_state_dict(model, version), spelling_state_dict(model, version + 1)
        for name in names:
            model.load_state_dict(new)
            model.get_parameter(name).data.copy_(old[name])
            said = set(model(MIXED_PROMPT).logits[0].argmax(-1).tolist())
            seen[name] += not said <= {spelled_token(version), spelled_token(version + 1)}
    assert min(seen.values()) >= tries // 2, {name: count for name, count in seen.items() if count < tries // 2}
    assert sum(seen.values()) >= 0.95 * tries * len(names)


@ARCHITECTURES
def test_half_an_update_makes_it_say_something_else(architecture, tied, dtype):
    model = tiny_model(architecture, tie_word_embeddings=tied, dtype=dtype)
    names = [name for name, _ in model.named_parameters()]
    old, new = spelling_state_dict(model, 3), spelling_state_dict(model, 4)
    for cut in range(1, len(names)):
        model.load_state_dict(old)
        for name in names[:cut]:
            model.get_parameter(name).data.copy_(new[name])
        said = set(model(MIXED_PROMPT).logits[0].argmax(-1).tolist())
        assert not said <= {spelled_token(3), spelled_token(4)}, names[cut]


def test_neighbouring_versions_say_different_tokens_and_never_a_special_one():
    tokens = [spelled_token(version) for version in range(251)]
    assert len(set(tokens)) == 251
    assert min(tokens) == 3
    assert max(tokens) == 253


def test_a_model_that_cannot_spell_is_refused_by_name():
    with pytest.raises(ValueError, match="not a qwen3 with 100"):
        spelling_state_dict(tiny_model(vocab_size=100), 1)
