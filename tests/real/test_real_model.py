"""SmolLM2-135M-Instruct from one GGUF file: Hugging Face's texts, and the trainer's bits with every feature on."""

import json
import os
import time
import urllib.request

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs_adapters import Observation
from rollout_engine import (
    LLM,
    RolloutPolicy,
    SamplingParams,
    SpeculationConfig,
    advantages,
    exact,
    float32_masters,
    minibatches,
)
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer
from rollout_engine.text.tokenizer import TextCodec
from tests.unit.peft_layers import PeftModel

pytestmark = pytest.mark.slow

NUM_TOKENS = int(os.environ.get("TOKENS", 2000))
"""Sampled tokens that are compared in each dtype."""
FEATURES = dict(speculation=SpeculationConfig(), max_num_batched_tokens=160, max_model_len=256, kv_cache_bytes=1 << 28)
"""With prefix caching, which is on by default. Prompts are computed in chunks beside sequences that decode."""
SETTINGS = {
    "one process": (0.9, {}),
    "a fleet of two": (0.05, dict(num_replicas=2, num_threads=1, max_num_batched_tokens=48)),
    "ranks of three": (0.05, dict(tensor_parallel_size=3, num_threads=1, max_num_batched_tokens=48)),  # 2 divide no 9
}
"""The share of the tokens of each, and its options: processes that wait for one another take far longer."""
SUBJECTS = ["the sea", "a clock", "rain", "seven", "bread", "the moon", "glass", "a bridge", "salt", "winter"]
FORMS = ["What is {}?", "Tell me a story of {}.", "Write a line about {}.", "Name 3 uses of {}.", "def {}(x):"]
PROMPTS = [form.format(subject) for form in FORMS for subject in SUBJECTS]
QUESTIONS = ["What is 2 + 2?", "And 3 more?", "Why?", "Name a fruit.", "Another.", "Which is red?", "Sum up.", "Bye."]
TEXTS = [
    "In 1989 twelve people paid $3.50; x = 7, y = 2.5e-3.",
    'for (int i = 0; i < n; i++) {\n\tprintf("%d\\n", i);\n}',
    "Größe, 你好, नमस्ते, 🙂‍↔️ and don't, WE'LL, it's",
    "<|im_start|>user\nHi<|im_end|>\n",
]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def assert_exact(trainer, batch):
    """Compare a batch with the trainer, some rows at a time; returns the number of tokens."""
    num_tokens = 0
    for rows in minibatches(batch, 64):
        with torch.no_grad():
            report = exact.check(rows, exact.token_logprobs(trainer, rows))
        assert report.is_exact and not report.num_mixed, report
        num_tokens += report.num_tokens
    return num_tokens


def test_weights_and_tokens_are_those_that_transformers_makes_of_the_file(path, load):
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours = load(torch.float32)
    expected = theirs.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in ours.state_dict().items())
    fields = ("rope_parameters", "rms_norm_eps", "head_dim", "tie_word_embeddings", "vocab_size", "hidden_act")
    assert [getattr(ours.config, name) for name in fields] == [getattr(theirs.config, name) for name in fields]
    their_tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    codec = TextCodec.from_pretrained(str(path))
    assert [codec.encode(text) for text in TEXTS] == [their_tokenizer(text).input_ids for text in TEXTS]
    assert codec.hf.chat_template == their_tokenizer.chat_template
    # transformers does not know "smollm" and divides as GPT-2; the original divides digits first (llama.cpp does too)
    spaces = codec.encode("  7")
    assert codec.hf.convert_ids_to_tokens(spaces) == ["ĠĠ", "7"] and their_tokenizer("  7").input_ids != spaces


def test_greedy_texts_are_hugging_faces(path, load):
    model = load(torch.float32)
    with LLM(path, dtype="float32", max_model_len=256, kv_cache_bytes=1 << 29, log_stats=False) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]  # many plain prompts are ended at once
        outputs = llm.chat(chats, SamplingParams(max_tokens=32, temperature=0), use_tqdm=False)
        options = dict(max_new_tokens=32, do_sample=False, pad_token_id=2, eos_token_id=2)
        for output in outputs:
            ids = torch.tensor([output.prompt_token_ids])
            found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
            text = llm.get_tokenizer().decode(found, skip_special_tokens=True)
            assert output.outputs[0].text == text, output.prompt
    assert len({output.outputs[0].text for output in outputs}) > 40


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_sampled_token_has_the_trainers_bits_with_every_feature_on(path, load, dtype, setting):
    """Prefix cache, drafts, groups, chunks of prompts; a share of the tokens over a fleet of two, and over ranks."""
    trainer = exact.enable(load(dtype))
    share, options = SETTINGS[setting]
    features = FEATURES | options
    wanted, num_tokens, seconds = NUM_TOKENS * share, 0, [0.0, 0.0]
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    with RolloutPolicy.from_pretrained(path, dtype=name_of(dtype), log_stats=False, **features) as policy:
        while num_tokens < wanted:
            some = conversations[: max(2, min(len(conversations), round((wanted - num_tokens) / (8 * 96))))]
            started = time.perf_counter()
            batch = policy.rollout(some, SamplingParams(max_tokens=96), num_samples=8, seed=num_tokens, use_tqdm=False)
            sampled = time.perf_counter()
            num_tokens += assert_exact(trainer, batch)
            seconds = [seconds[0] + sampled - started, seconds[1] + time.perf_counter() - sampled]
    rates = " and ".join(f"{num_tokens / each:.0f}" for each in seconds)
    print(
        f"{num_tokens} sampled tokens in {name_of(dtype)}, {setting}: 0 inexact; sampled and scored at {rates} tokens/s"
    )


class Interview:
    """Asks the questions one after the other."""

    def reset(self, seed):
        self.asked = 1
        return QUESTIONS[0]

    def step(self, action):
        self.asked += 1
        return Observation(
            QUESTIONS[self.asked - 1] if self.asked <= len(QUESTIONS) else "", terminated=self.asked > len(QUESTIONS)
        )


def test_conversations_of_eight_turns_are_exact_and_as_the_chat_template_has_them(path, load, dtype):
    trainer = exact.enable(load(dtype))
    options = dict(max_model_len=1024, kv_cache_bytes=1 << 28, log_stats=False)
    with RolloutPolicy.from_pretrained(path, dtype=name_of(dtype), **options) as policy:
        params = SamplingParams(max_tokens=12)
        batch = policy.rollout(None, params, env=Interview, num_episodes=3, num_samples=2, seed=3, use_tqdm=False)
        text = policy.tokenizer.decode(
            batch["tokens", "full"][0][batch["masks", "all_attention_mask"][0].bool()].tolist()
        )
    assert assert_exact(trainer, batch) >= 6 * 8
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    turns = text.split("<|im_start|>user\n")[1:]
    assert [turn.split("<|im_end|>")[0] for turn in turns] == QUESTIONS
    assert all("<|im_start|>assistant\n" in turn for turn in turns)


def test_chats_over_http_are_scored_alike_by_the_trainer(path, load):
    trainer = exact.enable(load(torch.float32))
    body = dict(model="default", messages=[{"role": "user", "content": "What is rain?"}], n=2, seed=3, max_tokens=24)
    with RolloutPolicy.from_pretrained(path, dtype="float32", max_model_len=256, kv_cache_bytes=1 << 28) as policy:
        with HttpServer(policy, ServeOptions(port=0)) as server:
            request = urllib.request.Request(
                f"{server.url}/v1/chat/completions",
                json.dumps(body | dict(logprobs=True, return_token_ids=True)).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=600) as response:
                answer = json.load(response)
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        prompt, sampled = choice["prompt_token_ids"], choice["token_ids"]
        with torch.no_grad():
            expected = exact.token_logprobs(trainer, torch.tensor([prompt + sampled]))[0, len(prompt) - 1 :]
        sent = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)
        assert np.array_equal(sent, expected.numpy())


def test_an_adapter_is_exact_before_and_after_a_step_of_its_training(path, load, dtype):
    trainer = PeftModel(load(dtype))
    with torch.no_grad():
        for each in trainer.adapters():
            each.lora_B["default"].weight.mul_(0.02)
    exact.enable(trainer)
    options = dict(max_model_len=256, kv_cache_bytes=1 << 28, log_stats=False)
    with RolloutPolicy.from_pretrained(path, dtype=name_of(dtype), **options) as policy:
        optimizer = torch.optim.SGD([each for each in trainer.parameters() if each.requires_grad], lr=0.01)
        for version in (1, 2):
            assert policy.update_weights(trainer, merge=False).version == version
            params = SamplingParams(max_tokens=24)
            batch = policy.rollout(PROMPTS[:4], params, num_samples=2, seed=3, lora_request="default", use_tqdm=False)
            logprobs = exact.token_logprobs(trainer, batch)
            assert exact.check(batch, logprobs).is_exact
            logprobs[batch["masks", "all_assistant_mask"][:, 1:]].mean().backward()
            optimizer.step()


def test_a_step_of_grpo_is_pushed_and_exact_again(path, load, dtype):
    trainer = exact.enable(load(dtype))
    optimizer = float32_masters(torch.optim.AdamW(trainer.parameters(), lr=1e-5))
    options = dict(max_model_len=256, kv_cache_bytes=1 << 28, log_stats=False)
    with RolloutPolicy.from_pretrained(path, dtype=name_of(dtype), **options) as policy:
        for version in (0, 1):
            batch = policy.rollout(
                [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:2]],
                SamplingParams(max_tokens=32),
                num_samples=4,
                reward_fn=lambda completions, **_: [float(len(each[0]["content"])) for each in completions],
                use_tqdm=False,
            )
            assert policy.policy_version == version
            logprobs = exact.token_logprobs(trainer, batch)
            assert exact.check(batch, logprobs).is_exact
            ratio = (logprobs - batch["log_probs", "full"][:, 1:]).exp()
            advantage = advantages.grpo(batch["next", "reward"], batch["group_id"])
            (-(ratio * advantage)[batch["masks", "all_assistant_mask"][:, 1:]].mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            policy.update_weights(trainer)
