"""Weight updates of a real engine: what steps compute changes at the commit, and by nothing else."""

import threading

import pytest
import torch

from rollout_engine import LLM, SamplingParams, errors
from rollout_engine.testing import tiny_checkpoint, tiny_model

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
PARAMS = SamplingParams(max_tokens=12, logprobs=0, seed=1, ignore_eos=True)
KINDS = [("llama", {}), ("qwen2", {}), ("qwen3", {"tie_word_embeddings": True})]


@pytest.fixture(params=KINDS, ids=lambda kind: kind[0])
def engine_and_kind(request, tmp_path):
    kind, changes = request.param
    tiny_checkpoint(tmp_path / "model", kind, **changes)
    with LLM(tmp_path / "model", num_kv_blocks=64, log_stats=False) as llm:
        yield llm, lambda seed: tiny_model(kind, seed=seed, **changes)


def samples(llm):
    outputs = [result.outputs[0] for result in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [(output.token_ids, output.logprobs.tolist()) for output in outputs]


def updater(llm):
    return llm.frontend.client.driver.executor.updater


@pytest.mark.quick(1)
def test_an_update_gives_the_samples_of_an_engine_that_loaded_those_weights(engine_and_kind, tmp_path):
    llm, trainer = engine_and_kind
    first = samples(llm)
    for seed in (1, 2, 0):
        source = trainer(seed)
        llm.update_weights(source)
        source.save_pretrained(tmp_path / str(seed))
        with LLM(tmp_path / str(seed), num_kv_blocks=64, log_stats=False, skip_tokenizer_init=True) as other:
            assert samples(llm) == samples(other)
    assert samples(llm) == first


@pytest.mark.quick(1)
def test_a_refused_update_leaves_weights_and_samples_as_they_were(engine_and_kind):
    llm, trainer = engine_and_kind
    llm.update_weights(trainer(1))
    before, digest = samples(llm), updater(llm).digest()
    last = list(trainer(2).state_dict().items())
    last[-1][1].view(-1)[-1] = float("nan")
    with pytest.raises(errors.ChecksumError, match="NaN or infinite"):
        llm.update_weights(iter(last))
    assert (samples(llm), updater(llm).digest(), llm.policy_version) == (before, digest, 1)
    assert llm.update_weights(trainer(1), version=1).num_tensors == 0  # these very weights are live


@pytest.mark.quick(1)
def test_samples_do_not_change_while_an_update_is_staged_and_verified(engine_and_kind):
    llm, trainer = engine_and_kind
    before, trace = samples(llm), []
    real = updater(llm)
    receive, verify = real.receive, real.verify
    real.receive = lambda receiver, check: receive(receiver, check=lambda name: trace.append(samples(llm)))
    real.verify = lambda: (verify(), trace.append(samples(llm)))
    llm.update_weights(trainer(1))
    assert len(trace) > 5 and all(seen == before for seen in trace)
    assert samples(llm) != before


@pytest.mark.quick(1)
def test_every_token_of_a_run_under_updates_is_some_versions_own(engine_and_kind):
    """Updates come from another thread while the engine steps; each step's log-probs are one version's."""
    llm, trainer = engine_and_kind
    sources = [trainer(seed) for seed in range(2)]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, ignore_eos=True)

    def logprob():
        output = llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0]
        return output.token_ids[0], output.logprobs[0]

    expected = []
    for source in sources:
        llm.update_weights(source)
        expected.append(logprob())
    failures, stop = [], threading.Event()

    def push():
        try:
            for i in range(30):
                llm.update_weights(sources[i % 2])
        except Exception as problem:
            failures.append(problem)
        stop.set()

    thread = threading.Thread(target=push)
    thread.start()
    seen = set()
    while not stop.is_set():
        seen.add(logprob())
    thread.join()
    assert not failures
    assert seen <= set(expected)


@pytest.mark.quick(1)
def test_the_digest_is_of_live_weights_while_others_are_staged(engine_and_kind):
    llm, trainer = engine_and_kind
    real, before = updater(llm), updater(llm).digest()
    verify, seen = real.verify, []

    def look():
        seen.append(real.digest())
        verify()
        seen.append(real.digest())

    real.verify = look
    llm.update_weights(trainer(1))
    assert seen == [before, before] and real.digest() != before


@pytest.mark.quick(1)
def test_live_weights_can_be_read_after_an_update(engine_and_kind):
    llm, trainer = engine_and_kind
    source = trainer(1)
    llm.update_weights(source)
    assert all(torch.equal(updater(llm).values(name), tensor) for name, tensor in source.state_dict().items())


@pytest.mark.quick(1)
@pytest.mark.parametrize("staging", ["shadow", "inplace"])
def test_a_partial_update_gives_the_samples_of_a_whole_one(engine_and_kind, staging):
    llm, trainer = engine_and_kind
    old, new = trainer(0).state_dict(), trainer(1).state_dict()
    part = {name: tensor for name, tensor in new.items() if "layers.1" in name or name.endswith("q_proj.weight")}
    whole = llm.update_weights(old | part)
    expected = samples(llm)
    llm.update_weights(old)
    report = llm.update_weights(part, partial=True, staging=staging)
    assert samples(llm) == expected != [] and llm.policy_version == report.version == 3
    assert report.digest == updater(llm).digest() and report.num_tensors == len(part)
    assert whole.num_tensors > len(part)
