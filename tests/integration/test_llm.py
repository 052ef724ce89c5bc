"""`LLM` and `LLMEngine` over a real tiny model, through the door users take."""

import gc
import shutil
import threading

import numpy as np
import pytest

from rollout_engine import (
    LLM,
    ConfigError,
    EngineConfig,
    LifecycleError,
    LLMEngine,
    RequestError,
    SamplingParams,
    VersionSpan,
)
from rollout_engine.model.cpu import sequence_logprobs
from rollout_engine.testing import tiny_checkpoint, tiny_model

PROMPTS = ["hello", "ab", "the quick brown fox jumps over the lazy dog"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(checkpoint):
    with LLM(checkpoint, num_kv_blocks=512, max_num_seqs=64) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """The shared engine, found empty and left empty."""
    yield shared
    assert shared.get_num_unfinished_requests() == 0
    assert shared.get_cache_usage() == 0.0
    shared.frontend.client.driver.core.check_integrity()


def generate(llm, prompts, **params):
    return llm.generate(prompts, SamplingParams(**params), use_tqdm=False)


def test_text_is_the_decoding_of_the_tokens(llm):
    for output in generate(llm, PROMPTS, max_tokens=24, n=2, seed=1):
        for sample in output.outputs:
            assert sample.text == llm.get_tokenizer().decode(sample.token_ids, skip_special_tokens=True)
            assert sample.finish_reason == ("stop" if sample.token_ids[-1] == 2 else "length")


def test_a_returned_seed_replays_its_sample(llm):
    (output,) = generate(llm, "hello", n=4, max_tokens=12)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    for sample in output.outputs:
        (replay,) = generate(llm, "hello", seed=sample.seed, max_tokens=12)
        assert replay.outputs[0].token_ids == sample.token_ids


def test_scores_equal_the_log_probs_of_sampling_bit_for_bit(llm):
    outputs = generate(llm, PROMPTS, max_tokens=16, temperature=0.7, logprobs=0, seed=3)
    completions = [output.outputs[0].token_ids for output in outputs]
    scores = llm.score([output.prompt_token_ids for output in outputs], completions, temperature=0.7)
    for score, output in zip(scores, outputs, strict=True):
        assert np.array_equal(score, output.outputs[0].logprobs)


def test_scores_have_the_same_bits_in_one_piece_and_in_many_with_steps_between(llm, monkeypatch):
    prompts = [[3 + (i * k) % 200 for i in range(1, 2 + k % 40)] for k in range(1, 60)]
    completions = [[5 + (i * k) % 200 for i in range(k % 20)] for k in range(1, 60)]
    monkeypatch.setattr(sequence_logprobs, "_TOKENS", 1 << 30)
    expected = llm.score(prompts, completions, temperature=0.7)
    stats = llm.frontend.client.driver.core.stats
    for tokens in (1, 100):
        monkeypatch.setattr(sequence_logprobs, "_TOKENS", tokens)
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        generating = threading.Thread(target=llm.generate, args=(PROMPTS, params), kwargs={"use_tqdm": False})
        num_steps = stats.num_steps
        generating.start()
        scores = llm.score(prompts, completions, temperature=0.7)
        generating.join()
        assert stats.num_steps - num_steps >= 100
        assert all(map(np.array_equal, scores, expected))


def test_asked_for_columns_have_their_shapes(llm):
    (output,) = generate(llm, "hello", max_tokens=5, logprobs=3, top_k=10, ignore_eos=True)
    (sample,) = output.outputs
    assert [column.shape for column in sample.top_logprobs] == [(5, 3), (5, 3)]
    assert sample.kept_logprob_mass.shape == sample.logprobs.shape == (5,)
    assert sample.cumulative_logprob == pytest.approx(float(sample.logprobs.sum()), rel=1e-6)


def test_a_stop_string_from_the_middle_of_the_text_cuts_it_there(llm):
    (whole,) = generate(llm, "hello", max_tokens=40, seed=5, ignore_eos=True)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:2]
    (cut,) = generate(llm, "hello", max_tokens=40, seed=5, ignore_eos=True, stop=[stop])
    sample = cut.outputs[0]
    assert (sample.text, sample.stop_reason) == (text[: text.index(stop)], stop)
    assert sample.token_ids == whole.outputs[0].token_ids[: len(sample.token_ids)]


def test_a_long_prompt_is_computed_once_for_all_samples_and_cached_for_the_next_call(llm):
    prompt = [3 + i % 200 for i in range(321)]
    stats = llm.frontend.client.driver.core.stats
    before = stats.num_prompt_tokens_computed
    (first,) = generate(llm, prompt, n=16, max_tokens=2)
    assert stats.num_prompt_tokens_computed - before == len(prompt)
    (second,) = generate(llm, prompt, n=16, max_tokens=2)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 320)


def test_streams_add_up_to_the_final_result(llm):
    engine, params = llm.llm_engine, SamplingParams(max_tokens=20, n=3, seed=9, output_kind="delta", logprobs=0)
    engine.add_request("stream", "hello", params)
    texts, ids, logprobs = [""] * 3, [[], [], []], [[], [], []]
    while engine.has_unfinished_requests():
        for output in engine.step():
            for sample in output.outputs:
                texts[sample.index] += sample.text
                ids[sample.index] += sample.token_ids
                logprobs[sample.index] += sample.logprobs.tolist()
    (whole,) = generate(llm, "hello", max_tokens=20, n=3, seed=9, logprobs=0)
    assert texts == [sample.text for sample in whole.outputs]
    assert ids == [sample.token_ids for sample in whole.outputs]
    assert logprobs == [sample.logprobs.tolist() for sample in whole.outputs]


def test_a_refused_batch_leaves_the_engine_as_it_was(llm):
    with pytest.raises(RequestError, match=r"prompts\[1\]: prompt_token_ids\[1\]=259 is not allowed.*\[0, 259\)"):
        generate(llm, [[5], [5, 259]])
    with pytest.raises(RequestError, match=r"max_tokens=5000.*max_model_len=2048"):
        generate(llm, "hello", max_tokens=5000)
    assert len(generate(llm, PROMPTS, max_tokens=2)) == 3


def test_weights_can_change_while_requests_run(checkpoint):
    with LLMEngine.from_config(EngineConfig(model=str(checkpoint), num_kv_blocks=64)) as engine:
        assert engine.get_model_metadata()["model.embed_tokens.weight"] == ("float32", (259, 64))
        params = SamplingParams(max_tokens=6, ignore_eos=True, output_kind="final_only")
        for kv in ("keep", "recompute"):
            engine.add_request(kv, "hello", params)
            engine.step()
            version = engine.policy_version
            report = engine.update_weights(tiny_model(seed=version + 1), kv=kv)
            assert (report.version, engine.policy_version, report.num_in_flight) == (version + 1, version + 1, 1)
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            oldest = version if kv == "keep" else version + 1
            expected = [VersionSpan(0, 1, version, version), VersionSpan(1, 6, version + 1, oldest)]
            assert outputs[0].outputs[0].version_spans == expected


def test_threads_share_one_llm(llm):
    expected = [output.outputs[0].token_ids for output in generate(llm, PROMPTS, max_tokens=6, seed=2)]
    results = {}

    def work(name):
        results[name] = [output.outputs[0].token_ids for output in generate(llm, PROMPTS, max_tokens=6, seed=2)]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [expected] * 3


def test_start_up_logs_every_choice_in_one_line(checkpoint, caplog):
    with caplog.at_level("INFO", logger="rollout_engine"), LLM(checkpoint, num_kv_blocks=8, seed=4):
        lines = [record.message for record in caplog.records if record.name == "rollout_engine"]
    (line,) = [line for line in lines if "device cpu" in line]
    for choice in ("float32", "KV pool 8 blocks of 16", "max_model_len 128", "max_num_seqs 256", "seed 4"):
        assert choice in line


def test_an_engine_without_a_tokenizer_works_on_token_ids(checkpoint, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ConfigError, match="skip_tokenizer_init=True"):
        LLM(bare, num_kv_blocks=8)
    with LLM(bare, num_kv_blocks=8, skip_tokenizer_init=True) as llm:
        (output,) = generate(llm, [5, 6], max_tokens=3, ignore_eos=True)
        assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 3)


def test_one_long_prompt_need_not_refuse_a_batch_and_recommended_settings_are_only_told(checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.25}')
    with LLM(copy, num_kv_blocks=8, max_model_len=32, on_long="clamp") as llm:
        outputs = generate(llm, [[5], [5] * 30], max_tokens=10, ignore_eos=True)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [10, 2]
        assert outputs[1].outputs[0].finish_reason == "length"
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25)


def test_a_missing_checkpoint_and_a_misspelt_option_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="Did you mean 'max_num_seqs'"):
        LLM(tmp_path, max_num_seq=4)


@pytest.mark.slow
def test_start_up_is_frozen_out_of_garbage_collection_until_shutdown(checkpoint, monkeypatch):
    monkeypatch.setattr("rollout_engine.engine.local_client.gc", gc)
    gc.unfreeze()
    llm = LLM(checkpoint, num_kv_blocks=8)
    assert gc.get_freeze_count() > 10_000
    llm.shutdown()
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as the tests began
    with pytest.raises(LifecycleError, match="shut down"):
        generate(llm, "x")
