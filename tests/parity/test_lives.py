"""Divided engines live at random: every token has the log-prob of one process, under the version that it names.

The layers are divided among stages, or a mixture's experts among engines.

Requests come at any step: with samples, prefixes of others, grammars, stop strings, adapters, and a logits processor
that raises. Meanwhile they are aborted, frozen, slept over and preempted, and weights change: whole, in part, in place,
or not at all, because an update is torn. At the end one process scores all that was sampled, version by version.
"""

import os
import random
import signal
import time
from collections import defaultdict

import numpy as np
import pytest
import torch

from rollout_engine import LLM, EngineConfig, LLMEngine, SamplingParams
from rollout_engine.base.errors import RolloutEngineError
from rollout_engine.kernels.cpu import phases, turns
from rollout_engine.testing import assert_clean, random_adapter, tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import HYBRID_SIZES, SIZES

pytestmark = pytest.mark.skipif(not (turns.is_available() and phases.is_available()), reason="no C++ compiler here")
CASES = {
    "dense": ("qwen3", dict(pipeline_parallel_size=2), dict(num_hidden_layers=5)),
    "tied": ("llama", dict(pipeline_parallel_size=3), dict(num_hidden_layers=5, tie_word_embeddings=True)),
    "mixture": ("qwen3_moe", dict(pipeline_parallel_size=3), dict(num_hidden_layers=4)),
    "hybrid": (
        "qwen3_5_text",
        dict(pipeline_parallel_size=2),
        dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2),
    ),
    "windows": ("gemma3_text", dict(pipeline_parallel_size=2), {}),
    "experts": ("qwen3_moe", dict(data_parallel_size=2), {}),
    "deaths": ("qwen3_moe", dict(data_parallel_size=2), {}),
    "three engines": ("mixtral", dict(data_parallel_size=3), {}),
    "stages of ranks": ("qwen3_moe", dict(pipeline_parallel_size=2, tensor_parallel_size=2), dict(num_hidden_layers=3)),
}
NUM_STEPS, MOST_SECONDS = 120, 300.0


class Fails:
    """A logits processor that raises at a token that `extra_args` names."""

    def __init__(self, vocab_size):
        pass

    def wants(self, params):
        return bool(params.extra_args)

    def apply(self, logits, sequence):
        if len(sequence.output_token_ids) == sequence.params.extra_args["at"]:
            raise RuntimeError("it was to fail here")
        return logits


class Life:
    """One engine, driven step by step; it remembers all that it said."""

    def __init__(self, engine, rng, make_model, is_here, is_deadly=False):
        self.engine, self.rng, self.make_model, self.is_here = engine, rng, make_model, is_here
        self.weights = dict(make_model(0).state_dict())
        self.changes = [self.weights]
        """State dictionaries, or adapters, by the version that they made."""
        self.ends, self.scores, self.prompts, self.adapters = {}, [], {}, {}
        self.held = None
        self.blows = set(rng.sample(range(NUM_STEPS), 3)) if is_deadly else set()
        """Steps at which an engine is killed, or their number changes."""

    def have(self, event):
        """Have something happen; while engines are killed it may be refused, and then has changed no weights."""
        try:
            event()
        except RolloutEngineError:
            assert self.blows and self.engine.policy_version == len(self.changes) - 1

    def kill(self):
        pids = [each.pid for each in self.engine.frontend.client.replicas() if each.pid]
        if pids:
            os.kill(self.rng.choice(pids), self.rng.choice([signal.SIGKILL, signal.SIGTERM]))

    def scale(self):
        self.have(lambda: self.engine.frontend.client.scale(self.rng.choice([1, 2, 3])))

    def play(self):
        events = [self.add] * 9 + [self.abort, self.hold, self.update, self.update_part, self.tear, self.score]
        events += [self.reset, self.hold, self.update_adapter]
        self.update()
        for step in range(NUM_STEPS):
            if step in self.blows:
                self.rng.choice([self.kill, self.scale])()
            if self.rng.random() < 0.7:
                self.have(self.rng.choice(events))
            if self.held is not None and self.rng.random() < 0.3:
                self.have(self.go_on)
            self.step()
        end = time.monotonic() + MOST_SECONDS
        while self.held is not None or self.engine.has_unfinished_requests():
            assert time.monotonic() < end, f"{self.prompts.keys() - self.ends.keys()} have not ended"
            if self.held is not None:
                self.have(self.go_on)
            self.step()
        if self.is_here:
            assert_clean(self.engine)
        else:
            self.engine.check_integrity()

    def step(self):
        for output in self.engine.step():
            if output.finished:
                assert output.request_id not in self.ends, "a request ends once"
                self.ends[output.request_id] = output

    def add(self):
        rng, number = self.rng, len(self.prompts)
        prompt = [rng.randrange(3, 200) for _ in range(rng.choice([1, 5, 17, 40]))]
        if self.prompts and rng.random() < 0.5:
            prompt = rng.choice(list(self.prompts.values()))[:40] + prompt[:3]
        fields = dict(n=rng.choice([1, 1, 3]), max_tokens=rng.choice([1, 6, 20]), logprobs=0, seed=number)
        match rng.randrange(8):
            case 0:
                fields |= dict(structured_outputs={"regex": "[a-z]{4,9}"})
            case 1:
                fields |= dict(extra_args={"at": rng.randrange(4)})
            case 2:
                fields |= dict(stop=[chr(each) for each in range(97, 109)], include_stop_str_in_output=True)
            case 3:
                fields |= dict(prompt_logprobs=0, ignore_eos=True)
            case 4:
                fields |= dict(repetition_penalty=1.3, top_p=0.9, min_tokens=1)
            case _:
                fields |= dict(ignore_eos=True)
        adapter = rng.choice([None, None, "a"])
        name = self.engine.add_request(
            str(number), {"prompt_token_ids": prompt}, SamplingParams(**fields), lora_request=adapter
        )
        self.prompts[name], self.adapters[name] = prompt, adapter

    def abort(self):
        if running := [name for name in self.prompts if self.engine.is_unfinished(name)]:
            self.engine.abort_request(self.rng.choice(running))

    def hold(self):
        """Freeze requests, or have the engine sleep, until `go_on`."""
        if self.held is None:
            self.held = self.rng.choice(["pause", 0, 1])
            if self.held == "pause":
                self.engine.pause_generation(mode="keep", clear_cache=self.rng.random() < 0.3)
            else:
                self.engine.sleep(level=self.held, mode="keep")

    def go_on(self):
        self.engine.resume_generation() if self.held == "pause" else self.engine.wake_up()
        self.held = None

    def update(self):
        if self.held != 1:
            model = self.make_model(len(self.changes))
            self.engine.update_weights(model, kv="recompute", staging=self.rng.choice(["shadow", "inplace"]))
            self.note(dict(model.state_dict()))

    def update_part(self):
        if self.held != 1:
            new = self.make_model(len(self.changes)).state_dict()
            part = {name: new[name] for name in self.rng.sample(sorted(new), 4) if "lm_head" not in name}
            self.engine.update_weights(part, partial=True, kv="recompute")
            self.note(self.weights | part)

    def update_adapter(self):
        """Engines in other processes step on before they compute KV again, so tokens would not be those of one."""
        if self.held != 1 and self.is_here:
            adapter = random_adapter(self.make_model(0), "a", seed=len(self.changes), revision=len(self.changes))
            self.engine.add_lora(adapter)
            self.reset()
            self.changes.append(adapter)

    def note(self, weights):
        self.weights = weights
        self.changes.append(weights)

    def tear(self):
        """Begin an update that fails half-way: nothing changes."""
        if self.held != 1:
            new = dict(self.make_model(77).state_dict())
            new[self.rng.choice(sorted(new))] *= torch.nan
            with pytest.raises(RolloutEngineError):
                self.engine.update_weights(new)

    def score(self):
        if self.held != 1:
            given = [[3, 4, 5], [6, 7]], [[6, 7, 8], [9, 3, 1, 4]]
            found = [each.tobytes() for each in self.engine.score(*given)]
            self.scores.append((self.engine.policy_version, given, found))

    def reset(self):
        self.engine.reset_prefix_cache(reset_running_requests=True)

    def spans(self):
        """For each version, (prompt, adapter, tokens, log-probs, start, stop) of all that was sampled under it."""
        found = defaultdict(list)
        for name, output in self.ends.items():
            for sample in output.outputs:
                tokens, logprobs = list(sample.token_ids), np.asarray(sample.logprobs, np.float32)
                for span in sample.version_spans:
                    place = span.start, span.end
                    row = (self.prompts[name], self.adapters[name], tokens, logprobs, *place)
                    found[span.policy_version].append(row)
        return found


def compare(life, one):
    """Have one process score what an engine of stages said."""
    spans = life.spans()
    for version, change in enumerate(life.changes):
        if version:
            (one.update_weights if isinstance(change, dict) else one.add_lora)(change)
        for prompt, adapter, tokens, logprobs, start, stop in spans.pop(version, ()):
            (scores,) = one.score([prompt + tokens[:start]], [tokens[start:stop]], lora=adapter)
            assert scores.tobytes() == logprobs[start:stop].tobytes(), (version, prompt, tokens, start, stop)
        for when, given, found in life.scores:
            if when == version:
                assert [each.tobytes() for each in one.score(*given)] == found
    assert not spans


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_whatever_happens_tokens_are_those_of_their_version(tmp_path, case, seed):
    rng = random.Random(f"lives {case} {seed}")
    architecture, sizes, given = CASES[case]
    fields = {**SIZES, **HYBRID_SIZES}.get(architecture, {}) | given

    def make_model(version):
        return tiny_model(architecture, seed=version, **fields)

    path = tiny_checkpoint(tmp_path, architecture, seed=0, **fields)
    options = dict(
        num_threads=1, log_stats=False, max_loras=1, max_lora_rank=16, dtype=rng.choice(["float32", "bfloat16"])
    )
    small = dict(num_kv_blocks=rng.choice([24, 60]), max_num_seqs=rng.choice([1, 3, 8]), block_size=4)
    small |= dict(max_num_batched_tokens=rng.choice([16, 64]), logits_processors=[f"{__name__}:Fails"])
    adapter = random_adapter(make_model(0), "a", seed=4)
    engine = LLMEngine.from_config(EngineConfig(model=str(path), **sizes, **options, **small))
    try:
        engine.add_lora(adapter)
        life = Life(engine, rng, make_model, is_here="data_parallel_size" not in sizes, is_deadly=case == "deaths")
        life.play()
        print(f"{case} {seed}: {len(life.prompts)} requests, {len(life.changes)} versions, {small}")
    finally:
        engine.shutdown()
    assert life.ends.keys() == life.prompts.keys()
    with LLM(str(path), **options, num_kv_blocks=80) as one:
        one.add_lora(adapter)
        compare(life, one)
