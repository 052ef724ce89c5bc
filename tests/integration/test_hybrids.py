"""Models whose layers keep a state, used as any other: updates in flight, adapters, episodes, files, sleep, ends."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from envs_adapters import Observation
from rollout_engine import LLM, EngineConfig, LLMEngine, RolloutPolicy, SamplingParams, SpeculationConfig, exact
from rollout_engine.base.errors import ConfigError
from rollout_engine.execution import worker
from rollout_engine.model.modules.routers import recording, routers_of
from rollout_engine.testing import assert_clean, random_adapter, tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import HYBRID_SIZES
from tests.parity.test_bits import mismatches
from tests.unit.peft_layers import PeftModel

TYPE = "qwen3_5_text"
PROMPTS = [list(range(3, 100)), list(range(3, 110)), [5]]
PARAMS = SamplingParams(max_tokens=16, logprobs=0, ignore_eos=True, seed=3)

pytestmark = pytest.mark.usefixtures("own_products")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(architecture, seed=0) -> directory of a tiny random model, made once."""
    made = {}

    def make(architecture=TYPE, dtype=torch.float32, seed=0):
        key = (architecture, dtype, seed)
        if key not in made:
            directory = tmp_path_factory.mktemp(architecture)
            sizes = HYBRID_SIZES[architecture]
            made[key] = tiny_checkpoint(directory, architecture, dtype=dtype, seed=seed, **sizes)
        return made[key]

    return make


def trainer_of(directory):
    return exact.enable(AutoModelForCausalLM.from_pretrained(directory))


def core_of(llm):
    return llm.llm_engine.frontend.client.driver.core


def counters(llm):
    return llm.get_metrics().core.counters


def same(one, other):
    return one.token_ids == other.token_ids and np.array_equal(one.logprobs, other.logprobs)


def right_logprobs(trainer, prompt, sample):
    ids = torch.tensor([prompt + list(sample.token_ids)])
    with torch.no_grad():
        return exact.token_logprobs(trainer, ids)[0, len(prompt) - 1 :].numpy()


@pytest.mark.quick(1)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_spans_name_the_version_of_each_token_and_of_the_oldest_state(checkpoint, kv):
    old, new = trainer_of(checkpoint()), trainer_of(checkpoint(seed=1))
    engine = LLMEngine.from_config(EngineConfig(model=str(checkpoint()), log_stats=False))
    engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, PARAMS.clone(n=2))
    outputs = [output for _ in range(6) for output in engine.step()]
    engine.update_weights(new, kv=kv)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    for sample in outputs[-1].outputs:
        first, second = sample.version_spans
        assert (first.policy_version, second.policy_version) == (0, 1)
        assert second.kv_min_version == (0 if kv == "keep" else 1)
        before = right_logprobs(old, PROMPTS[0], sample)
        assert np.array_equal(sample.logprobs[: first.end], before[: first.end])
        after = right_logprobs(new, PROMPTS[0], sample)
        assert np.array_equal(sample.logprobs[first.end :], after[first.end :]) == (kv == "recompute")
    engine.add_request("b", {"prompt_token_ids": PROMPTS[0]}, PARAMS)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert np.array_equal(outputs[-1].outputs[0].logprobs, right_logprobs(new, PROMPTS[0], outputs[-1].outputs[0]))
    assert_clean(engine)
    engine.shutdown()


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_requests_that_an_update_waits_for_or_ends_have_the_old_bits(checkpoint, mode):
    old, new = trainer_of(checkpoint()), trainer_of(checkpoint(seed=1))
    engine = LLMEngine.from_config(EngineConfig(model=str(checkpoint()), log_stats=False))
    engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, PARAMS.clone(n=2))
    outputs = [output for _ in range(6) for output in engine.step()]
    engine.update_weights(new, mode=mode)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    for sample in outputs[-1].outputs:
        assert {span.policy_version for span in sample.version_spans} == {0}
        assert (len(sample.token_ids) < 16) == (mode == "abort")
        assert np.array_equal(sample.logprobs, right_logprobs(old, PROMPTS[0], sample))
    assert_clean(engine)
    engine.shutdown()


def test_a_part_of_the_weights_reaches_mixers_and_is_read_by_name(checkpoint):
    old, new = (AutoModelForCausalLM.from_pretrained(checkpoint(seed=seed)) for seed in range(2))
    part = {name: value for name, value in new.state_dict().items() if ".linear_attn." in name}
    assert part
    with LLM(str(checkpoint()), log_stats=False) as llm:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.update_weights(part, partial=True)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        name = "model.layers.0.linear_attn.conv1d.weight"
        [rows] = llm.collective_rpc("get_weight_rows", args=(name, 2))
        assert rows == part[name][:2].tolist()
        assert_clean(llm.llm_engine)
    old.load_state_dict(part, strict=False)
    assert mismatches(outputs, exact.enable(old), 1.0) == (3 * 16, 0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_forgets_states_and_weights_come_back_from_a_directory(checkpoint, level):
    with LLM(str(checkpoint()), log_stats=False) as llm:
        first = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.sleep(level=level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(str(checkpoint(seed=1)))
        again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [output.num_cached_tokens for output in again][:1] == [0]
        assert_clean(llm.llm_engine)
    assert all(same(a.outputs[0], b.outputs[0]) for a, b in zip(first, again, strict=True)) == (level == 1)
    assert mismatches(again, trainer_of(checkpoint(seed=level - 1)), 1.0) == (3 * 16, 0)


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        pytest.param(name, targets.split(), id=name, marks=() if name == TYPE else pytest.mark.slow)
        for name, targets in (
            (TYPE, "in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj"),
            ("bamba", "in_proj out_proj"),
            ("lfm2", "in_proj out_proj"),
            ("falcon_h1", "in_proj out_proj q_proj"),
            ("nemotron_h", "in_proj out_proj"),
            ("granitemoehybrid", "in_proj out_proj"),
            ("kimi_linear", "q_proj k_proj v_proj b_proj o_proj f_a_proj g_b_proj"),
            ("olmo_hybrid", "q_proj g_proj a_proj b_proj o_proj"),
            ("qwen3_next", "in_proj_qkvz in_proj_ba out_proj"),
        )
    ],
)
def test_adapters_of_mixers_are_exact(checkpoint, architecture, targets):
    directory = checkpoint(architecture, torch.bfloat16)
    trainer = exact.enable(PeftModel(AutoModelForCausalLM.from_pretrained(directory), targets, rank=5))
    other = random_adapter(tiny_model(architecture, **HYBRID_SIZES[architecture]), "other", targets=targets)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with RolloutPolicy.from_pretrained(directory, dtype="bfloat16", deterministic=True, max_model_len=256) as policy:
        policy.add_lora(trainer.request())
        policy.add_lora(other)
        batches = [
            policy.rollout(["abc", "x" * 70], params, num_samples=2, seed=1, lora_request=lora, use_tqdm=False)
            for lora in ("x", "other", None)
        ]
    places = [batch["masks", "all_assistant_mask"][:, 1:] for batch in batches]
    sampled = [batch["log_probs", "full"][:, 1:][place] for batch, place in zip(batches, places, strict=True)]
    ours = exact.token_logprobs(trainer, batches[0])
    assert torch.equal(ours[places[0]].detach(), sampled[0])
    ours.sum().backward()
    assert all(layer.lora_B["default"].weight.grad.any() for layer in trainer.adapters())
    for layer in trainer.adapters():
        layer.disable_adapters = True
    ids, mask = batches[2]["tokens", "full"], batches[2]["masks", "all_attention_mask"]
    assert torch.equal(exact.token_logprobs(trainer, ids, mask)[places[2]].detach(), sampled[2])


@pytest.mark.parametrize(
    "architecture",
    ["nemotron_h", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_moe_text", "lfm2_moe"))],
)
def test_routed_experts_are_recorded_through_hits_and_replayed(checkpoint, architecture):
    trainer = trainer_of(checkpoint(architecture))
    params = PARAMS.clone(n=2, return_routed_experts=True, max_tokens=30, seed=None)
    with LLM(str(checkpoint(architecture)), log_stats=False, max_num_batched_tokens=33, num_kv_blocks=25) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        (first,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        turn = PROMPTS[0] + first.outputs[0].token_ids + [7, 8]
        (second,) = llm.generate([turn], params, use_tqdm=False)
        assert second.num_cached_tokens > 0
        assert_clean(llm.llm_engine)
    for output in [*outputs, first, second]:
        for sample in output.outputs:
            ids = output.prompt_token_ids + sample.token_ids
            with recording(routers_of(trainer)) as chosen, torch.no_grad():
                trainer(torch.tensor([ids]))
            assert np.array_equal(sample.routed_experts, torch.stack(chosen, 1).numpy()[:-1])
    with RolloutPolicy.from_pretrained(checkpoint(architecture)) as policy:
        batch = policy.rollout(["one", "two"], SamplingParams(max_tokens=9, return_routed_experts=True), seed=1)
        ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
        logprobs = exact.token_logprobs(trainer, ids, mask, routed_experts=batch["routed_experts"])
        sampled = batch["masks", "all_assistant_mask"][:, 1:]
        assert torch.equal(logprobs[sampled], batch["log_probs", "full"][:, 1:][sampled])
        assert torch.equal(policy.score(batch, replay_routing=True), batch["log_probs", "full"])


class Telling:
    """Eight turns; says something of a length of its own after each."""

    def reset(self, seed):
        self.random, self.left = random.Random(seed), 8
        return self._words()

    def step(self, action):
        self.left -= 1
        return Observation(self._words(), reward=self.random.random(), terminated=self.left == 0)

    def _words(self):
        return "".join(self.random.choices("abcdefgh ", k=self.random.randint(15, 25)))


@pytest.mark.parametrize("num_samples", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_earlier_turns_are_not_computed_again_and_every_turn_is_exact(checkpoint, num_samples):
    with RolloutPolicy.from_pretrained(checkpoint(), max_model_len=512) as policy:
        before = policy.get_metrics().core.counters.num_prompt_tokens_computed
        params = SamplingParams(max_tokens=12)
        batch = policy.rollout(
            None, params, env=Telling, num_episodes=16, num_samples=num_samples, seed=1, use_tqdm=False
        )
        computed = policy.get_metrics().core.counters.num_prompt_tokens_computed - before
        assert exact.check(batch, exact.token_logprobs(trainer_of(checkpoint()), batch)).is_exact
    episodes = 16 * num_samples
    assert batch["num_turns"].sum() == episodes * 8
    glue = int((batch["masks", "all_attention_mask"] & ~batch["masks", "all_assistant_mask"]).sum())
    needed = glue + episodes * 7  # the last token of an answer has no KV before the next turn
    assert computed <= 1.05 * needed, f"{computed} computed, {needed} needed"


def test_a_turn_that_a_stop_string_ends_is_not_computed_again(checkpoint):
    """Without drafts: of several tokens of a step that are behind it, the core keeps the state."""
    with LLM(str(checkpoint()), log_stats=False, speculation="off") as llm:
        (free,) = llm.generate(PROMPTS[:1], PARAMS.clone(max_tokens=40), use_tqdm=False)
        stop = free.outputs[0].text[30:33]
        (first,) = llm.generate(PROMPTS[:1], PARAMS.clone(max_tokens=60, stop=[stop]), use_tqdm=False)
        sample = first.outputs[0]
        assert sample.stop_reason == stop and len(sample.token_ids) < 41
        turn = PROMPTS[0] + list(sample.token_ids) + [7, 8]
        (second,) = llm.generate([turn], PARAMS, use_tqdm=False)
        assert second.num_cached_tokens == len(turn) - 3
        assert mismatches([first, second], trainer_of(checkpoint()), 1.0) == (len(sample.token_ids) + 16, 0)
        assert_clean(llm.llm_engine)


def test_a_hit_of_a_long_prompt_leaves_at_most_an_interval_and_a_block(checkpoint):
    prompt = random.Random(0).choices(range(3, 259), k=2048)
    trainer = trainer_of(checkpoint())
    with LLM(str(checkpoint()), log_stats=False, max_num_seqs=4) as llm:
        for shared, most in ((2048, 16), (1900, 512 + 16)):
            llm.reset_prefix_cache()
            (first,) = llm.generate([prompt[:2000]], PARAMS.clone(max_tokens=2), use_tqdm=False)
            (output,) = llm.generate([prompt[:shared][:2000] + [7, 8, 9]], PARAMS, use_tqdm=False)
            assert 0 <= min(shared, 2000) - output.num_cached_tokens <= most
            assert mismatches([first, output], trainer, 1.0) == (2 + 16, 0)


def test_a_group_computes_its_prompt_once(checkpoint):
    prompt = random.Random(0).choices(range(3, 259), k=300)
    for num_tokens in (64, 512):
        with LLM(str(checkpoint()), log_stats=False, max_num_seqs=3, max_num_batched_tokens=num_tokens) as llm:
            outputs = llm.generate([prompt], PARAMS.clone(n=8), use_tqdm=False)
            assert counters(llm).num_prompt_tokens_computed == 300
            assert mismatches(outputs, trainer_of(checkpoint()), 1.0) == (8 * 16, 0)
            assert_clean(llm.llm_engine)


@pytest.mark.parametrize(
    "options",
    [
        dict(state_cache_bytes=0),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (dict(state_cache_bytes=1), dict(max_num_seqs=1))),
    ],
    ids=str,
)
def test_many_samples_through_few_slots(checkpoint, options):
    options = dict(max_num_seqs=2, max_num_batched_tokens=16) | options
    with LLM(str(checkpoint()), log_stats=False, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS.clone(n=32, max_tokens=5), use_tqdm=False)
        outputs += llm.generate(PROMPTS, PARAMS.clone(n=3, max_tokens=1), use_tqdm=False)
        assert_clean(llm.llm_engine)
    assert mismatches(outputs, trainer_of(checkpoint()), 1.0) == (3 * 32 * 5 + 3 * 3, 0)


def test_requests_that_are_aborted_in_the_middle_leave_nothing(checkpoint):
    engine = LLMEngine.from_config(EngineConfig(model=str(checkpoint()), log_stats=False, max_num_batched_tokens=20))
    for num_steps in (0, 3, 6, 8):
        for name, prompt in zip("abc", PROMPTS, strict=True):
            engine.add_request(f"{name}{num_steps}", {"prompt_token_ids": prompt}, PARAMS.clone(n=3))
        for _ in range(num_steps):
            engine.step()
        engine.abort_request([f"a{num_steps}", f"c{num_steps}"])
        engine.check_integrity()
        outputs = []
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.request_id == f"b{num_steps}"]
        assert mismatches(outputs[-1:], trainer_of(checkpoint()), 1.0) == (3 * 16, 0)
        assert_clean(engine)
    engine.shutdown()


def test_a_sharded_state_gives_the_same_bits(checkpoint, tmp_path):
    with LLM(str(checkpoint(dtype=torch.bfloat16)), log_stats=False) as llm:
        expected = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.save_sharded_state(tmp_path / "state")
    with LLM(str(tmp_path / "state"), log_stats=False, load_format="sharded", skip_tokenizer_init=True) as llm:
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert all(same(a.outputs[0], b.outputs[0]) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_a_trainer_with_a_cache_is_refused(kind):
    sizes = HYBRID_SIZES[TYPE] | dict(num_hidden_layers=2, layer_types=["linear_attention", kind])
    trainer = exact.enable(tiny_model(TYPE, **sizes))
    cache = DynamicCache(config=trainer.config)
    with pytest.raises(ConfigError, match="was given past_key_values.*use_cache=False, or generate with the engine"):
        trainer(torch.tensor([[5, 6, 7]]), past_key_values=cache)


def test_exact_load_and_a_training_step_stay_exact(checkpoint):
    trainer = exact.load(str(checkpoint(dtype=torch.bfloat16)))
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
    with RolloutPolicy.from_pretrained(checkpoint(dtype=torch.bfloat16)) as policy:
        for version in range(2):
            batch = policy.rollout(["one", "two"], SamplingParams(max_tokens=12), num_samples=3, seed=1, use_tqdm=False)
            logprobs = exact.token_logprobs(trainer, batch)
            report = exact.check(batch, logprobs)
            assert report.is_exact and report.num_tokens, report
            logprobs[batch["masks", "all_assistant_mask"][:, 1:]].mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert policy.update_weights(trainer).version == version + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(enable_prefix_caching=False, state_cache_bytes=4096), "are both set: no state is kept to be found again"),
    ],
    ids=str,
)
def test_what_is_not_possible_is_refused_by_a_sentence(checkpoint, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint()), log_stats=False, **options)


def test_a_model_without_states_says_that_it_keeps_none(tmp_path):
    with pytest.raises(ConfigError, match="state_cache_bytes=4096 is for models whose layers keep states"):
        LLM(str(tiny_checkpoint(tmp_path)), log_stats=False, state_cache_bytes=4096)


def test_a_draft_model_with_states_is_refused_before_the_policy_is_loaded(checkpoint, monkeypatch):
    loaded = []
    monkeypatch.setattr(worker, "load_model", lambda *args: loaded.append(args))
    drafts = SpeculationConfig(draft_model=str(checkpoint()))
    with pytest.raises(ConfigError, match="has layers that keep a state, and these do not draft yet"):
        LLM(str(checkpoint()), log_stats=False, speculation=drafts)
    assert not loaded
