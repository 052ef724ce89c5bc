"""Penalties, masks and logits processors through the door users take: alone, in a batch, forked, preempted."""

import pytest
import torch

from rollout_engine import LLM, ConfigError, SamplingParams, SpeculationConfig
from rollout_engine.testing import tiny_checkpoint

PROMPT = list(range(3, 43))
RULES = dict(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.7,
    logit_bias={40: 3.0, 41: -5.0},
    bad_words=["a", "()"],
    min_tokens=6,
    extra_args={"least": 20},
)
PARAMS = dict(max_tokens=40, logprobs=2, temperature=0.9, top_p=0.95, seed=1234)


class AtLeast:
    """Only ids from `least` on; raises on "fail" once three tokens are there."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def wants(self, params):
        return bool(params.extra_args)

    def apply(self, logits, sequence):
        if sequence.params.extra_args.get("fail") and len(sequence.output_token_ids) == 3:
            raise RuntimeError("told to fail")
        logits[: sequence.params.extra_args["least"]] = -torch.inf
        return logits


class Watching(AtLeast):
    """The same; remembers the outputs that it was shown."""

    shown: list = []

    def apply(self, logits, sequence):
        self.shown.append(sequence.output_token_ids)
        return super().apply(logits, sequence)


class NotAProcessor:
    def __init__(self, vocab_size):
        pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def make(checkpoint, **options):
    return LLM(checkpoint, logits_processors=[f"{__name__}:AtLeast"], log_stats=False, **options)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with make(checkpoint, num_kv_blocks=512) as llm:
        yield llm


def test_a_logits_processor_is_shown_no_drafted_token_that_was_not_drawn(checkpoint, llm):
    (expected,) = generate(llm, [PROMPT], n=3, **RULES)
    options = dict(logits_processors=[f"{__name__}:Watching"], log_stats=False, num_kv_blocks=512)
    with LLM(checkpoint, speculation=SpeculationConfig(), **options) as drafting:
        core = drafting.frontend.client.driver.core
        core._scheduler.speculator._costs.of = lambda num_rows: 1.0  # every draft pays
        other_seed, same_seed = PARAMS["seed"] + 1, PARAMS["seed"]
        for seed in (other_seed, same_seed, same_seed):
            Watching.shown.clear()
            (found,) = generate(drafting, [PROMPT], n=3, **RULES | {"seed": seed})
        assert sum(core.stats.drafts.num_drafted) > sum(core.stats.drafts.num_accepted) > 20
    outputs = [tuple(sample.token_ids) for sample in found.outputs]
    assert outputs == [tuple(sample.token_ids) for sample in expected.outputs]
    assert [a.logprobs.tobytes() for a in found.outputs] == [a.logprobs.tobytes() for a in expected.outputs]
    assert all(any(output[: len(shown)] == tuple(shown) for output in outputs) for shown in Watching.shown)


def generate(llm, prompts, **params):
    return llm.generate(prompts, SamplingParams(**(PARAMS | params)), use_tqdm=False)


def columns(sample):
    return sample.token_ids, sample.logprobs.tolist(), [column.tolist() for column in sample.top_logprobs]


def test_rules_hold_and_a_sample_is_the_same_alone_and_in_a_batch(llm):
    others = [SamplingParams(max_tokens=30, seed=i, presence_penalty=i % 3) for i in range(20)]
    params = SamplingParams(**(PARAMS | RULES))
    alone = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
    prompts = [[5 + i, 9, 11] * (i % 5 + 1) for i in range(20)]
    together = llm.generate([*prompts, PROMPT], [*others, params], use_tqdm=False)[-1].outputs[0]
    assert columns(together) == columns(alone)
    assert min(alone.token_ids) >= 20
    assert "a" not in alone.text
    assert "()" not in alone.text
    assert columns(generate(llm, [PROMPT])[0].outputs[0]) != columns(alone)


def test_forked_samples_equal_their_replays(llm):
    (group,) = generate(llm, [PROMPT], **RULES, n=4)
    for sample in group.outputs:
        (replay,) = generate(llm, [PROMPT], **(RULES | {"seed": sample.seed}))
        assert columns(replay.outputs[0]) == columns(sample)


def test_preemption_does_not_change_a_sample(llm, checkpoint):
    params = [SamplingParams(**(PARAMS | RULES | {"seed": s})) for s in range(6)]
    roomy = llm.generate([PROMPT] * 6, params, use_tqdm=False)
    with make(checkpoint, num_kv_blocks=11, enable_prefix_caching=False) as tight_llm:
        tight = tight_llm.generate([PROMPT] * 6, params, use_tqdm=False)
        assert tight_llm.llm_engine.stats.num_preemptions > 0
    assert [columns(o.outputs[0]) for o in tight] == [columns(o.outputs[0]) for o in roomy]


def test_only_allowed_tokens_are_sampled(llm):
    (output,) = generate(llm, ["hello"], allowed_token_ids=[70, 80, 90], max_tokens=30)
    assert set(output.outputs[0].token_ids) <= {70, 80, 90}
    assert output.outputs[0].finish_reason == "length"


def test_a_word_is_bad_only_when_it_would_be_complete(llm):
    bias = {llm.get_tokenizer().encode(letter)[0]: 100.0 for letter in "ab"}
    (output,) = generate(llm, ["x"], logit_bias=bias, bad_words=["aa", "bbb"], max_tokens=60)
    text = output.outputs[0].text
    assert set(text) == {"a", "b"}
    assert "aa" not in text
    assert "bbb" not in text


def test_a_failing_processor_ends_its_request_with_the_reason_and_no_other(llm):
    params = [SamplingParams(max_tokens=8, ignore_eos=True, seed=1, extra_args=args) for args in ({"least": 3}, None)]
    expected = llm.generate(["x", "x"], params, use_tqdm=False)
    failing = SamplingParams(max_tokens=8, ignore_eos=True, seed=1, extra_args={"least": 3, "fail": True})
    first, second, third = llm.generate(["x"] * 3, [params[0], failing, params[1]], use_tqdm=False)
    (sample,) = second.outputs
    assert (sample.finish_reason, len(sample.token_ids)) == ("error", 3)
    assert sample.error == f"logits processor {__name__}:AtLeast failed in apply: RuntimeError: told to fail."
    assert [o.outputs[0].token_ids for o in (first, third)] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.parametrize(
    "name, words",
    [
        ("AtLeast", "must be of the form 'package.module:Class'"),
        ("nowhere.at_all:AtLeast", "ModuleNotFoundError"),
        (f"{__name__}:Missing", "AttributeError"),
        (f"{__name__}:NotAProcessor", "has no method wants or apply"),
        ("math:sqrt", "has no method wants or apply"),
    ],
)
def test_a_processor_that_cannot_be_made_is_refused_at_start_up(checkpoint, name, words):
    with pytest.raises(ConfigError, match=f"logits_processors: '{name}'.*{words}"):
        LLM(checkpoint, num_kv_blocks=8, logits_processors=(name,))
