from rollout_engine.sampling_params import SamplingParams


def test_generate_keeps_the_order_of_prompts(make_llm):
    llm = make_llm()
    prompts = [
        "a",
        [5, 6, 7],
        {"prompt": "b"},
        {"prompt_token_ids": [9]},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (9, 2, 7, 1, 3)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 7, 1, 3]
    assert [output.prompt for output in outputs] == ["a", None, "b", None, "<|user|>x<eos><|assistant|>"]
    assert all(output.finished for output in outputs)
