"""Structured outputs through the door users take: alone, in a batch, forked, preempted, drafted, in another process."""

import asyncio
import json
import threading

import msgspec
import numpy as np
import pytest
import regex

from rollout_engine import (
    LLM,
    AsyncLLM,
    EngineConfig,
    RequestError,
    RolloutPolicy,
    SamplingParams,
    SpeculationConfig,
    read_jsonl,
    replay,
)
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.testing import tiny_checkpoint

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "is": {"enum": ["x", "y"]}},
    "required": ["name", "age", "is"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
NUMBERS = "[0-9]{3}(-[0-9]{2})+"
FORMS = {
    "json": {"json": PERSON},
    "regex": {"regex": NUMBERS},
    "grammar": {"grammar": 'start: "<" item ("," item)* ">"\nitem: /[a-c]+/'},
    "choice": {"choice": ["yes", "no", "perhaps not"]},
    "tag": {"structural_tag": {"structures": [{"begin": "(a", "schema": PERSON, "end": ")"}], "triggers": ["(a"]}},
}
PROMPT = list(range(3, 43))
PARAMS = dict(max_tokens=60, logprobs=2, temperature=0.9, seed=1234)
END = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, num_kv_blocks=512, log_stats=False) as llm:
        yield llm


def params_of(form, **changes):
    return SamplingParams(**(PARAMS | {"structured_outputs": FORMS[form]} | changes))


def columns(sample):
    return sample.token_ids, sample.logprobs.tolist(), [column.tolist() for column in sample.top_logprobs]


def all_columns(outputs):
    return [columns(sample) for output in outputs for sample in output.outputs]


MIXED = [params_of(form, n=3, seed=seed) for seed in range(3) for form in FORMS]


@pytest.fixture(scope="module")
def expected(llm):
    """Samples of all forms, computed one request after the other."""
    return [llm.generate([PROMPT], params, use_tqdm=False)[0] for params in MIXED]


def test_every_output_that_ends_has_its_form(expected):
    num_ended = 0
    for params, output in zip(MIXED, expected, strict=True):
        for sample in output.outputs:
            assert sample.finish_reason in ("stop", "length")
            if sample.finish_reason == "length":
                continue
            num_ended += 1
            assert sample.token_ids[-1] == END and END not in sample.token_ids[:-1]
            [(kind, value)] = params.structured_outputs.items()
            if kind == "json":
                found = json.loads(sample.text)
                assert list(found) == ["name", "age", "is"] and found["is"] in ("x", "y")
            elif kind == "regex":
                assert regex.fullmatch(value, sample.text)
            elif kind == "choice":
                assert sample.text in value
            elif kind == "grammar":
                assert regex.fullmatch("<[a-c]+(,[a-c]+)*>", sample.text)
    assert num_ended > 15


def test_a_sample_is_the_same_alone_and_in_a_batch_with_others(llm, expected):
    others = [SamplingParams(max_tokens=30, seed=i, presence_penalty=i % 3) for i in range(10)]
    together = llm.generate([PROMPT] * 25, [*MIXED, *others], use_tqdm=False)
    assert all_columns(together[:15]) == all_columns(expected)


@pytest.mark.slow
def test_forked_samples_equal_their_replays(llm, expected):
    for params, output in zip(MIXED, expected, strict=True):
        for sample in output.outputs:
            (again,) = llm.generate([PROMPT], params.clone(n=1, seed=sample.seed), use_tqdm=False)
            assert columns(again.outputs[0]) == columns(sample)


@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "ahead"])
@pytest.mark.slow
def test_preemption_and_steps_ahead_change_no_sample(checkpoint, expected, is_async):
    options = dict(num_kv_blocks=14, max_num_batched_tokens=24, enable_prefix_caching=False, log_stats=False)
    with LLM(checkpoint, async_scheduling=is_async, max_model_len=120, **options) as tight:
        found = tight.generate([PROMPT] * len(MIXED), MIXED, use_tqdm=False)
        assert tight.llm_engine.stats.num_preemptions > 0
    assert all_columns(found) == all_columns(expected)


@pytest.mark.slow
def test_drafts_change_no_token_and_no_bit(checkpoint, expected):
    with LLM(checkpoint, speculation=SpeculationConfig(), num_kv_blocks=512, log_stats=False) as drafting:
        core = drafting.frontend.client.driver.core
        core._scheduler.speculator._costs.of = lambda num_rows: 1.0  # every draft pays
        for _ in range(2):  # the second time drafts are right
            found = drafting.generate([PROMPT] * len(MIXED), MIXED, use_tqdm=False)
            assert all_columns(found) == all_columns(expected)
        assert sum(core.stats.drafts.num_accepted) > 100
        other = [params.clone(seed=params.seed + 7) for params in MIXED]  # and these are mostly wrong
        found = drafting.generate([PROMPT] * len(MIXED), other, use_tqdm=False)
    with LLM(checkpoint, num_kv_blocks=512, log_stats=False) as plain:
        assert all_columns(found) == all_columns(plain.generate([PROMPT] * len(MIXED), other, use_tqdm=False))


@pytest.mark.slow
def test_a_core_in_its_own_process_gives_the_same(checkpoint, expected):
    async def last(engine, params):
        return [output async for output in engine.generate(PROMPT, params)][-1]

    async def main():
        config = EngineConfig(model=str(checkpoint), num_kv_blocks=512, log_stats=False)
        async with AsyncLLM.from_config(config) as engine:
            found = await asyncio.gather(*(last(engine, params) for params in MIXED))
            with pytest.raises(RequestError, match="unclosed group"):
                await last(engine, params_of("regex", structured_outputs={"regex": "(a"}))
        return found

    assert all_columns(asyncio.run(main())) == all_columns(expected)


def test_a_sample_goes_on_behind_the_tokens_that_a_lost_engine_drew(checkpoint, llm, expected):
    """Continues as a fleet does what a crashed replica had."""
    params, whole = MIXED[0].clone(n=1), expected[0].outputs[0]
    request = llm.frontend.inputs.admit(llm.frontend.inputs.check(PROMPT, params), seed=whole.seed)
    request = msgspec.structs.replace(request, output_token_ids=whole.token_ids[:9])
    found = []

    class Listener:
        def deliver(self, outputs):
            found.extend(outputs.token_ids)

    client = LocalClient.start(EngineConfig(model=str(checkpoint), num_kv_blocks=64, log_stats=False))
    try:
        client.listen(Listener())
        client.add_request(request)
        while client.driver.core.has_unfinished_requests():
            client.turn(lambda: False)
    finally:
        client.shutdown()
    assert len(whole.token_ids) > 12 and found == whole.token_ids[9:]


def test_tempered_log_probs_are_those_without_a_mask_and_processed_ones_those_with_it(llm):
    tempered, processed = (
        llm.generate([PROMPT], params_of("regex", logprobs=64, logprobs_mode=mode), use_tqdm=False)[0].outputs[0]
        for mode in ("tempered", "processed")
    )
    assert tempered.token_ids == processed.token_ids
    scored = llm.score([PROMPT], [tempered.token_ids], temperature=PARAMS["temperature"])[0]
    assert np.array_equal(np.asarray(scored, np.float32), np.asarray(tempered.logprobs, np.float32))
    digits = set(llm.get_tokenizer().encode("0123456789"))
    ids, values = (column[0] for column in processed.top_logprobs)
    assert set(ids[np.isfinite(values)].tolist()) == digits
    assert abs(np.exp(values[np.isfinite(values)].astype(np.float64)).sum() - 1) < 1e-5


def test_processed_log_probs_follow_from_the_tokens_that_were_allowed(llm):
    """A trainer does the same: the log-prob within the allowed tokens is the tempered one less their log mass."""
    (output,) = llm.generate([PROMPT], params_of("regex", logprobs=-1, logprobs_mode="tempered"), use_tqdm=False)
    (masked,) = llm.generate([PROMPT], params_of("regex", logprobs_mode="processed"), use_tqdm=False)
    digits, dash = llm.get_tokenizer().encode("0123456789"), llm.get_tokenizer().encode("-")
    sample = output.outputs[0]
    allowed = [digits, digits, digits, dash, digits, digits]
    for place, ids in enumerate(allowed):
        row = dict(zip(*(column[place].tolist() for column in sample.top_logprobs), strict=True))
        mass = np.log(np.exp(np.array([row[i] for i in ids], np.float64)).sum())
        assert abs(row[sample.token_ids[place]] - mass - masked.outputs[0].logprobs[place]) < 1e-5


def test_a_form_that_cannot_end_stops_at_the_limit(llm):
    (output,) = llm.generate(["a"], params_of("grammar", structured_outputs={"grammar": "start: /[ab]/ start"}))
    [sample] = output.outputs
    assert (sample.finish_reason, len(sample.token_ids)) == ("length", PARAMS["max_tokens"])
    assert set(sample.text) == {"a", "b"}
    forced = params_of("grammar", structured_outputs={"grammar": 'start: "ab" start'})  # no choice is left, and no end
    [sample] = llm.generate(["a"], forced, use_tqdm=False)[0].outputs
    assert (sample.finish_reason, sample.text) == ("length", "ab" * (PARAMS["max_tokens"] // 2))


def test_stop_ids_end_an_output_only_where_it_is_complete(llm):
    stop = llm.get_tokenizer().encode("-")
    params = params_of("regex", stop_token_ids=stop, n=8, logit_bias={stop[0]: 20.0})
    (output,) = llm.generate([PROMPT], params.clone(structured_outputs={"regex": "[0-9]{2}|a-?"}), use_tqdm=False)
    for sample in output.outputs:
        assert sample.finish_reason == "stop" and regex.fullmatch("[0-9]{2}|a", sample.text)
        assert sample.token_ids[-1] == stop[0]


def test_ids_to_stop_at_can_be_the_only_ends_of_a_form(llm):
    stop = llm.get_tokenizer().encode("-")
    params = params_of("regex", structured_outputs={"regex": "[ab]{2}"}, stop_token_ids=stop, ignore_eos=True, n=4)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    for sample in output.outputs:
        assert sample.finish_reason == "stop" and len(sample.token_ids) == 3 and sample.token_ids[-1] == stop[0]


def test_a_form_and_other_masks_hold_together(llm):
    digits = llm.get_tokenizer().encode("0123456789")
    params = params_of("regex", structured_outputs={"regex": "[a-z0-9]{2,6}"}, min_tokens=5, n=8)
    (output,) = llm.generate([PROMPT], params.clone(allowed_token_ids=[*digits, END], bad_words=["7"]), use_tqdm=False)
    for sample in output.outputs:
        assert regex.fullmatch("[0-689]{5,6}", sample.text)


def test_a_form_that_is_complete_too_soon_fails_its_request_with_the_reason(llm):
    bad, good = params_of("choice", min_tokens=20), params_of("choice")
    first, second = llm.generate([PROMPT, PROMPT], [bad, good], use_tqdm=False)
    assert first.outputs[0].finish_reason == "error" and "structured_outputs" in first.outputs[0].error
    assert second.outputs[0].finish_reason == "stop"


@pytest.mark.slow
def test_a_log_of_samples_with_forms_is_made_again_bit_for_bit(checkpoint, tmp_path):
    options = dict(dtype="float32", num_kv_blocks=1024, max_model_len=256)
    with RolloutPolicy.from_pretrained(checkpoint, **options) as policy:
        for form in ("json", "regex"):
            params = SamplingParams(max_tokens=40, structured_outputs=FORMS[form])
            policy.rollout(["one", "another"], params, num_samples=2, log_to=tmp_path / form, use_tqdm=False)
        samples = [*read_jsonl(tmp_path / "json"), *read_jsonl(tmp_path / "regex")]
    with RolloutPolicy.from_pretrained(checkpoint, **options) as another:
        reports = replay(another, samples)
    assert len(reports) == 8 and all(report.is_equal and report.causes == [] for report in reports)


def test_a_form_that_is_still_compiled_keeps_no_other_request_waiting(llm):
    compiler, may_compile = llm.frontend.client.driver.executor.worker.grammars, threading.Event()
    compiler._thread.submit(may_compile.wait)
    engine = llm.llm_engine
    engine.add_request("bound", PROMPT, params_of("regex", structured_outputs={"regex": "[0-9]{7}"}))
    engine.add_request("free", PROMPT, SamplingParams(max_tokens=5))
    ends = []
    while engine.has_unfinished_requests():
        ends += [output.request_id for output in engine.step() if output.finished]
        if ends == ["free"]:
            may_compile.set()
    assert ends == ["free", "bound"]


@pytest.mark.slow
def test_shutdown_ends_the_process_that_tries_forms(checkpoint):
    with LLM(checkpoint, num_kv_blocks=64, log_stats=False) as llm:
        llm.generate([PROMPT], params_of("choice"), use_tqdm=False)
        [process] = llm.frontend.inputs._trials._process._processes
    assert process._process.returncode is not None


def test_without_a_tokenizer_a_form_is_refused(checkpoint):
    with LLM(checkpoint, skip_tokenizer_init=True, num_kv_blocks=64, log_stats=False) as llm:
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            llm.generate([PROMPT], params_of("choice", detokenize=False), use_tqdm=False)
