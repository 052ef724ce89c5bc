import threading

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.faces.reader import Reader

HI = [{"role": "user", "content": "hi"}]
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


def test_generate_keeps_the_order_of_prompts(make_llm):
    prompts = ["a", [5, 6, 7], {"prompt": "b"}, {"prompt_token_ids": [9]}, {"messages": HI}]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (9, 2, 7, 1, 3)]
    outputs = make_llm().generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 7, 1, 3]
    assert [output.prompt for output in outputs] == ["a", None, "b", None, "<|user|>hi<eos><|assistant|>"]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("prompt", ["a", [5, 6], {"prompt": "a"}])
def test_one_prompt_gives_a_list_of_one(make_llm, prompt):
    assert len(make_llm().generate(prompt, SHORT, use_tqdm=False)) == 1


def test_no_prompts_give_no_outputs(make_llm):
    assert make_llm().generate([], use_tqdm=False) == []
    assert make_llm().chat([], use_tqdm=False) == []


def test_default_params_sample_to_the_end_token_or_the_model_length(make_llm):
    (output,) = make_llm(scripts={0: [70, 2]}).generate([[5]], use_tqdm=False)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([70, 2], "stop")


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_results_are_whole_whatever_the_output_kind(make_llm, kind):
    params = SamplingParams(max_tokens=5, n=2, ignore_eos=True, output_kind=kind)
    (output,) = make_llm().generate(["a"], params, use_tqdm=False)
    assert [len(sample.token_ids) for sample in output.outputs] == [5, 5]


def test_dicts_stand_for_sampling_params_and_only_whole_results_come(make_llm):
    params = {"max_tokens": 2, "ignore_eos": True, "output_kind": "delta"}
    llm = make_llm()
    assert [len(output.outputs[0].token_ids) for output in llm.generate(["a", "b"], params, use_tqdm=False)] == [2, 2]
    (output,) = llm.generate(["a"], [params], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


def test_chat_takes_one_conversation_or_many(make_llm):
    llm = make_llm()
    one = llm.chat(HI, SHORT, use_tqdm=False)
    many = llm.chat([HI, HI], SHORT, use_tqdm=False)
    assert [output.prompt for output in (*one, *many)] == ["<|user|>hi<eos><|assistant|>"] * 3
    with pytest.raises(RequestError, match="a conversation"):
        llm.chat("hi")


def test_options_of_the_chat_template_are_arguments_of_chat_and_generate(make_llm):
    llm = make_llm()
    for verb in (llm.chat, llm.generate):
        (output,) = verb(HI, SHORT, use_tqdm=False, add_generation_prompt=False)
        assert output.prompt == "<|user|>hi<eos>"
    with pytest.raises(RequestError, match="Hugging Face's .* give max_tokens"):
        llm.generate("a", max_new_tokens=5)


def test_prompts_run_by_their_priorities(make_llm, monkeypatch):
    llm = make_llm(max_num_seqs=1)
    finished = []
    read = Reader.read
    noting = lambda reader: [finished.append(output.request_id) or output for output in read(reader)]  # noqa: E731
    monkeypatch.setattr(Reader, "read", noting)
    outputs = llm.generate(["a", "b", "c"], SHORT, use_tqdm=False, priority=[3, 1, 2])
    assert finished == [outputs[index].request_id for index in (1, 2, 0)]
    with pytest.raises(RequestError, match=r"^prompts\[1\]: priority='high' is not allowed"):
        llm.generate(["a", "b"], SHORT, use_tqdm=False, priority=[1, "high"])
    assert llm.get_num_unfinished_requests() == 0


def test_a_bad_prompt_refuses_the_batch_and_leaves_the_engine_usable(make_llm):
    llm = make_llm()
    with pytest.raises(RequestError, match=r"prompts\[1\]: prompt='' is not allowed"):
        llm.generate(["a", ""], SHORT, use_tqdm=False)
    with pytest.raises(RequestError, match=r"prompts\[0\]: sampling_params='hot' is not allowed"):
        llm.generate(["a"], ["hot"], use_tqdm=False)
    assert llm.get_num_unfinished_requests() == 0
    assert len(llm.generate(["a"], SHORT, use_tqdm=False)) == 1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temprature": 1.0}, "Did you mean 'temperature'"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"top_p": 0.0}, "top_p=0"),
        ({"n": 10**9}, "n=1000000000"),
        ({"logprobs": 65}, "logprobs=65"),
        ({"stop": ["x"] * 10_000}, "10000 strings"),
    ],
)
def test_bad_sampling_options_are_refused_when_the_params_are_made(options, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(**options)


def test_an_interrupted_generate_leaves_nothing_behind(make_llm):
    llm = make_llm()
    llm.llm_engine.executor.interrupt_at_step = 3
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=20, n=3, ignore_eos=True), use_tqdm=False)
    assert llm.get_num_unfinished_requests() == 0
    assert llm.get_cache_usage() == 0.0
    assert len(llm.generate(["a", "b"], SHORT, use_tqdm=False)) == 2


def test_results_of_requests_added_elsewhere_wait_for_their_owner(make_llm):
    llm = make_llm()
    llm.llm_engine.add_request("mine", "x", SamplingParams(max_tokens=2, ignore_eos=True, output_kind="delta"))
    assert len(llm.generate(["a"], SHORT, use_tqdm=False)) == 1
    (output,) = llm.llm_engine.step()
    assert (output.request_id, output.finished, len(output.outputs[0].token_ids)) == ("mine", True, 2)


def test_a_caller_who_steps_the_engine_takes_no_result_of_generate(make_llm):
    llm = make_llm()
    stop, taken = threading.Event(), []

    def step():
        while not stop.is_set():
            taken.extend(llm.llm_engine.step())

    thread = threading.Thread(target=step)
    thread.start()
    outputs = llm.generate(["a", "b", "c"], SHORT, use_tqdm=False)
    stop.set()
    thread.join()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [SHORT.max_tokens] * 3 and not taken


def test_a_failed_sample_is_reported_and_the_others_come_back(make_llm):
    llm = make_llm(errors={1: "NaN logits"})
    outputs = llm.generate(["a", "b", "c"], SHORT, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].error == "NaN logits"


def test_the_progress_bar_shows_when_asked_for_and_only_then(make_llm, capsys):
    llm = make_llm()
    llm.generate(["a"], SHORT, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate(["a"], SHORT)
    assert "tokens/s" in capsys.readouterr().err


def test_the_engines_verbs_are_the_llms_too(make_llm, codec):
    with make_llm() as llm:
        assert llm.policy_version == 0
        assert llm.get_tokenizer() is codec.hf
        assert llm.get_model_metadata() == llm.llm_engine.get_model_metadata()
        assert [list(score) for score in llm.score([[5]], [[1, 2]])] == [[-1.0, -2.0]]
    assert llm.llm_engine.executor.is_shut_down
