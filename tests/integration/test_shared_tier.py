"""Two engines over one tier, while weights, adapters and files change at random: no KV is ever taken for other KV.

A third engine without a shared tier, to which nothing happens, computes the same requests. Its tokens, log-probs and
blocks are the truth.
"""

import random
import shutil
from collections import Counter
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from rollout_engine import LLM, SamplingParams
from rollout_engine.testing import random_adapter, random_picture, tiny_checkpoint, tiny_model, tiny_vision_checkpoint
from rollout_engine.testing.architectures import ALL_SIZES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_products")]
BLOCK = 16
NORM = "model.layers.0.input_layernorm.weight"
STEM = [3 + 7 * i % 250 for i in range(200)]
PROMPTS = [STEM[:150], STEM[:90] + STEM[5:60], STEM[:48], STEM[3:163], STEM[:150] + [9] * 20]


def open_engine(path, connector, **options):
    sizes = dict(num_kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=96, seed=5, log_stats=False)
    return LLM(path, kv_connector=connector, **(sizes | options))


def link_of(llm):
    return llm.llm_engine.frontend.client.driver.executor.kv_link


def settle(llm):
    """Wait until all that an engine has saved is written."""
    assert link_of(llm)._connector.wait_until_written(60)


def bits(output):
    return [(list(each.token_ids), np.asarray(each.logprobs).tobytes()) for each in output.outputs]


class Weights:
    """Models by (seed, value of one norm or None), and adapters by their seeds."""

    def __init__(self, architecture):
        self._architecture, self._base = architecture, tiny_model(architecture, **sizes_of(architecture))

    def of(self, seed, norm):
        state = dict(tiny_model(self._architecture, seed=seed, **sizes_of(self._architecture)).state_dict())
        return state if norm is None else state | {NORM: torch.full_like(state[NORM], norm)}

    def adapter(self, name, seed, revision):
        return msgspec.structs.replace(random_adapter(self._base, name=name, seed=seed), revision=revision)


def sizes_of(architecture):
    return {} if architecture == "qwen3" else ALL_SIZES[architecture]


class Truth:
    """The engine to which nothing happens."""

    def __init__(self, llm, weights):
        self._llm, self._weights, self._live, self._answers = llm, weights, (0, None), {}
        self.blocks = {}
        """Key -> bytes of a block that it has computed."""
        link_of(llm).save = lambda key, data: self.blocks.setdefault(key, bytes(data))

    def answer(self, live, adapter, prompt, params):
        name = live, adapter, tuple(prompt), params.max_tokens, params.n, params.seed
        if name not in self._answers:
            if live != self._live:
                self._llm.update_weights(self._weights.of(*live), kv="recompute")
                self._live = live
            self._llm.reset_prefix_cache()
            lora = None if adapter is None else self._weights.adapter(f"seed {adapter}", adapter, 0)
            (output,) = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False, lora_request=lora)
            self._answers[name] = bits(output)
        return self._answers[name]


class Engine:
    """One of the two, and the weights and adapters that it serves."""

    def __init__(self, llms, weights, truth, choice, directory):
        """`llms`: this one and the other."""
        self.llms, self.llm = llms, llms[0]
        self._weights, self._truth, self._random, self._directory = weights, truth, choice, directory
        self.live, self.adapters, self._revision = (0, None), {}, 0
        self.num_lookups = self.num_checked = self.num_wrong = 0
        self._unchecked = []
        link = link_of(self.llm)
        self._load, self._holds = link.load, link.holds
        link.load, link.holds = self.load, self.holds

    def holds(self, key):
        self.num_lookups += 1
        return self._holds(key)

    def load(self, key):
        self.num_lookups += 1
        data = self._load(key)
        if data is not None:
            self._unchecked.append((key, bytes(data)))
        return data

    def check_loads(self):
        """Compare the blocks that were loaded with those that the other engine has computed by now."""
        known = [each for each in self._unchecked if each[0] in self._truth.blocks]
        self.num_wrong += sum(self._truth.blocks[key] != data for key, data in known)
        self.num_checked += len(known)
        self._unchecked = [each for each in self._unchecked if each[0] not in self._truth.blocks]

    def act(self):
        names = ["request"] * 12 + ["update", "update", "partial", "adapt", "reset", "sleep", "over", "damage"]
        name = self._random.choice(names)
        getattr(self, name)()
        self.check_loads()
        return name

    def request(self):
        if self._random.random() < 0.7:
            self.llm.reset_prefix_cache()
        adapter, prompt, params = self._draw()
        found = self._generate([prompt] * self._random.choice([1, 1, 2]), adapter, params)
        seed = None if adapter is None else self.adapters[adapter][0]
        expected = self._truth.answer(self.live, seed, prompt, params)
        assert all(bits(output) == expected for output in found), (self.live, seed, len(prompt), params)

    def update(self):
        live = self._random.randrange(3), None
        kv, staging = self._random.choice(["keep", "recompute"]), self._random.choice(["auto", "inplace"])
        self.llm.update_weights(self._weights.of(*live), kv=kv, staging=staging)
        self.live = live

    def partial(self):
        norm = self._random.choice([0.5, 1.5])
        self.llm.update_weights({NORM: self._weights.of(0, norm)[NORM]}, partial=True)
        self.live = self.live[0], norm

    def adapt(self):
        """Replace an adapter under its name, sometimes while a request runs under it."""
        name, seed = self._random.choice("ab"), self._random.randrange(3)
        runs = name in self.adapters and self._random.random() < 0.5
        self._revision += 1
        made = self._weights.adapter(name, seed, self._revision)
        if runs:
            self._begin(name)
        self.llm.add_lora(made)
        self._finish()
        self.adapters[name] = seed, made

    def reset(self):
        self.llm.reset_prefix_cache(reset_connector=self._random.random() < 0.2)

    def sleep(self):
        level = self._random.choice([0, 1, 2])
        self._begin(None)
        self.llm.sleep(level, mode="keep")
        self.llm.wake_up()
        if level == 2:
            self.update()
        self._finish()

    def over(self):
        """Requests run over an update, and some of them are aborted or run over a pause."""
        self._begin(self._draw()[0])
        if self._random.random() < 0.3:
            self.llm.pause_generation(mode="keep")
            self.llm.resume_generation()
        self._random.choice([self.update, self.partial])()
        if self._random.random() < 0.3:
            self.llm.llm_engine.abort_request(["over 0"])
        self._finish()

    def damage(self):
        """Do something to some of the files, while no thread changes them."""
        for llm in self.llms:
            settle(llm)
        files = sorted(path for path in self._directory.rglob("*") if len(path.name) == 62 and path.is_file())
        for path in self._random.sample(files, min(len(files), 5)):
            content = bytearray(path.read_bytes())
            match self._random.randrange(5):
                case 0:
                    content[self._random.randrange(len(content))] ^= 1 << self._random.randrange(8)
                case 1:
                    del content[self._random.randrange(len(content)) :]
                case 2:
                    content[:] = self._random.choice(files).read_bytes()
                case 3:
                    path.unlink()
                    path.symlink_to(self._random.choice(files))
                    continue
                case 4 if self._random.random() < 0.2:
                    shutil.rmtree(self._directory)
                    return
            path.write_bytes(content)

    def _draw(self):
        adapter = self._random.choice([None, *self.adapters])
        tokens = dict(max_tokens=self._random.choice([1, 3, 20]), n=self._random.choice([1, 1, 3]))
        params = SamplingParams(**tokens, seed=self._random.randrange(2), logprobs=0, ignore_eos=True)
        return adapter, self._random.choice(PROMPTS), params

    def _generate(self, prompts, adapter, params):
        lora = None if adapter is None else self.adapters[adapter][1]
        rows = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(rows, params, use_tqdm=False, lora_request=lora)

    def _begin(self, adapter):
        """Add some requests, and run a few steps of them."""
        core, lora = self.llm.llm_engine, None if adapter is None else self.adapters[adapter][1]
        for number in range(3):
            params = SamplingParams(max_tokens=40, seed=number, ignore_eos=True, n=1 + number % 2)
            prompt = {"prompt_token_ids": self._random.choice(PROMPTS)}
            core.add_request(f"over {number}", prompt, params, lora_request=lora)
        for _ in range(self._random.randrange(1, 20)):
            core.step()

    def _finish(self):
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()


def play(architecture, tmp_path, seed, num_lookups):
    """Act at random until the engines have looked up that number of keys; returns what was counted."""
    path, directory = tmp_path / "model", tmp_path / "kv"
    tiny_checkpoint(path, architecture, dtype=torch.float32, **sizes_of(architecture))
    weights, choice, acts = Weights(architecture), random.Random(seed), Counter()
    with (
        open_engine(path, "host", num_kv_blocks=256) as plain,
        open_engine(path, f"disk:{directory}", kv_connector_bytes=3 << 20) as one,
        open_engine(path, f"disk:{directory}", kv_connector_bytes=3 << 20) as two,
    ):
        truth = Truth(plain, weights)
        engines = [Engine(llms, weights, truth, choice, directory) for llms in ((one, two), (two, one))]
        while sum(engine.num_lookups for engine in engines) < num_lookups:
            acts[choice.choice(engines).act()] += 1
        tiers = [engine.llm.get_metrics().core.counters.kv_tier for engine in engines]
    names = "num_lookups", "num_checked", "num_wrong"
    counts = {name: sum(getattr(engine, name) for engine in engines) for name in names}
    counts |= {name: sum(getattr(each, name) for each in tiers) for name in ("num_loaded", "num_saved", "num_refused")}
    print(architecture, seed, counts, dict(acts))
    return SimpleNamespace(**counts, acts=acts)


@pytest.mark.parametrize(("architecture", "seed"), [("qwen3", 1), ("qwen3_5_text", 2), ("deepseek_v3", 3)])
def test_of_ten_thousand_lookups_none_finds_kv_of_other_weights_adapters_or_files(tmp_path, architecture, seed):
    found = play(architecture, tmp_path, seed, 10_000)
    assert found.num_wrong == 0 and found.num_checked > found.num_loaded / 2 > 100
    assert found.num_refused > 0 and len(found.acts) == 8


def test_the_second_of_two_engines_computes_at_most_a_block_of_a_long_prompt_until_its_weights_change(tmp_path):
    path = tiny_checkpoint(tmp_path / "model", max_position_embeddings=4096)
    prompt = {"prompt_token_ids": [3 + 11 * i % 250 for i in range(2048)]}
    params = SamplingParams(max_tokens=8, logprobs=0, ignore_eos=True, seed=3)
    options = dict(num_kv_blocks=512, max_num_batched_tokens=512)
    with (
        open_engine(path, None, **options) as plain,
        open_engine(path, f"disk:{tmp_path / 'kv'}", **options) as one,
        open_engine(path, f"disk:{tmp_path / 'kv'}", **options) as two,
    ):
        for seed, is_known in ((0, False), (1, False), (2, False), (1, True)):
            before = [llm.get_metrics().core.counters.num_prompt_tokens_computed for llm in (one, two)]
            for llm in (plain, one, two):
                llm.update_weights(tiny_model(seed=seed, max_position_embeddings=4096))
                llm.reset_prefix_cache()
            found = [bits(llm.generate([prompt], params, use_tqdm=False)[0]) for llm in (plain, one)]
            settle(one)
            found.append(bits(two.generate([prompt], params, use_tqdm=False)[0]))
            after = [llm.get_metrics().core.counters.num_prompt_tokens_computed for llm in (one, two)]
            assert found[0] == found[1] == found[2]
            assert after[0] - before[0] == (BLOCK if is_known else 2048) and after[1] - before[1] == BLOCK


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "qwen3_5"])
def test_pictures_are_found_by_another_engine_and_only_the_same_ones(tmp_path, family):
    path = tiny_vision_checkpoint(tmp_path / "model", family)
    options = dict(num_kv_blocks=96, max_model_len=512, dtype="float32", max_num_batched_tokens=2048)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    text = "What is in this picture, and what was in the one before? " * 3

    def ask(*seeds):
        parts = [{"type": "image", "image": random_picture(seed, 36, 28)} for seed in seeds]
        return [
            {"role": "user", "content": [{"type": "text", "text": "Look: "}, *parts, {"type": "text", "text": text}]}
        ]

    with (
        open_engine(path, None, **options) as plain,
        open_engine(path, f"disk:{tmp_path / 'kv'}", **options) as one,
        open_engine(path, f"disk:{tmp_path / 'kv'}", **options) as two,
    ):
        one.chat(ask(7), params, use_tqdm=False)  # so that numbers of pictures differ
        for seeds in ((3,), (4,), (3, 4), (4, 3), (3, 3)):
            outputs = [llm.chat(ask(*seeds), params, use_tqdm=False)[0] for llm in (plain, one)]
            settle(one)
            outputs += two.chat(ask(*seeds), params, use_tqdm=False)
            assert bits(outputs[0]) == bits(outputs[1]) == bits(outputs[2])
            length = len(outputs[2].prompt_token_ids)
            assert outputs[2].num_cached_tokens >= length - BLOCK, (seeds, outputs[2].num_cached_tokens, length)
            assert outputs[1].num_cached_tokens < outputs[1].pictures[-1].end
