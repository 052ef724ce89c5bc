"""Rollouts: what comes back, what the reward function sees, and what is left after an error."""

import asyncio
import json
import threading

import numpy as np
import pytest
import torch

from rollout_engine.base.errors import EngineGenerateError, RequestError, RewardError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import child_seed, mix
from rollout_engine.batches.jsonl import to_jsonl
from rollout_engine.batches.layout import places
from rollout_engine.faces.llm import LLM
from rollout_engine.rollouts.policy import RolloutPolicy

VOCAB_SIZE = 259
PROMPTS = ["one", "three", "a much longer prompt"]
SHORT = SamplingParams(max_tokens=6)


def lengths(prompts, completions, completion_ids, **columns):
    return [len(ids) for ids in completion_ids]


def sampled(batch, row):
    return batch["tokens", "full"][row][batch["masks", "all_assistant_mask"][row]].tolist()


def sampled_ids(batch, row):
    """In either layout."""
    return batch["tokens", "response"][places(batch).response[row]].tolist()


def test_a_rollout_is_what_the_engine_generates(make_rig):
    batch = make_rig().rollout(num_samples=2, seed=11)
    params = [SamplingParams(max_tokens=6, n=2, seed=mix(11, i), logprobs=0) for i in range(3)]
    outputs = LLM.from_engine(make_rig().engine).generate(PROMPTS, params, use_tqdm=False)
    samples = [sample for output in outputs for sample in output.outputs]
    assert [sampled(batch, row) for row in range(6)] == [sample.token_ids for sample in samples]
    assert list(batch["text", "response"]) == [sample.text for sample in samples]
    assert list(batch["text", "prompt"]) == [prompt for prompt in PROMPTS for _ in range(2)]
    assert batch["group_id"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["sample_index"].tolist() == [0, 1] * 3
    logprobs = np.concatenate([sample.logprobs for sample in samples])
    assert batch["log_probs", "response"][batch["masks", "response"]].tolist() == logprobs.tolist()


def test_a_policy_stands_on_an_llm_too(rig):
    assert RolloutPolicy(LLM.from_engine(rig.engine)).rollout("x", SHORT, use_tqdm=False).batch_size == (1,)


def test_one_rollout_seed_gives_every_sequence_its_own(rig):
    batch = rig.rollout(num_samples=3, seed=2**64 - 1)
    expected = [child_seed(mix(2**64 - 1, p), i) for p in range(3) for i in range(3)]
    assert [seed % 2**64 for seed in batch["seed"].tolist()] == expected
    again = rig.rollout(num_samples=3, seed=2**64 - 1)
    assert torch.equal(batch["tokens", "full"], again["tokens", "full"])


def test_a_returned_seed_replays_its_sequence_alone(rig):
    batch = rig.rollout(num_samples=3)
    row = 5
    alone = SamplingParams(max_tokens=6, seed=int(batch["seed"][row]) % 2**64)
    assert sampled(rig.rollout(PROMPTS[1], alone), 0) == sampled(batch, row)


def test_a_line_of_a_file_replays_its_sequence(rig, tmp_path):
    to_jsonl(rig.rollout(num_samples=3), tmp_path / "rollouts.jsonl")
    line = json.loads((tmp_path / "rollouts.jsonl").read_text().splitlines()[5])
    again = rig.rollout([line["prompt_token_ids"]], SamplingParams(max_tokens=6, seed=line["seed"]))
    assert sampled(again, 0) == line["response_token_ids"]


def test_prompts_of_several_kinds_and_params_each(rig):
    prompts = ["text", [5, 6, 7], {"messages": [{"role": "user", "content": "hi"}]}]
    batch = rig.rollout(prompts, [SamplingParams(max_tokens=k, n=k, ignore_eos=True) for k in (1, 2, 3)])
    assert batch["group_id"].tolist() == [0, 1, 1, 2, 2, 2]
    assert batch["masks", "response"].sum(1).tolist() == [1, 2, 2, 3, 3, 3]
    assert batch["tokens", "prompt"][1].tolist()[-3:] == [5, 6, 7]


def test_conversations_are_prompts_and_reach_the_reward_as_they_were_given(rig):
    conversations = [[{"role": "user", "content": text}] for text in ("hi", "ho")]
    seen = []

    def reward(prompts, completions, completion_ids):
        seen.append(prompts)
        return [0.0, 1.0]

    options = {"num_samples": 2, "reward_fn": reward, "add_generation_prompt": False}
    batch = rig.rollout(conversations, **options)
    assert list(batch["text", "prompt"]) == ["<|user|>hi<eos>"] * 2 + ["<|user|>ho<eos>"] * 2
    assert sorted(seen, key=str) == [[conversation] * 2 for conversation in conversations]
    assert rig.rollout(conversations[0], num_samples=2).batch_size == (2,)


def test_recommended_settings_are_the_engines(rig):
    assert rig.policy.get_default_sampling_params() == SamplingParams()


def test_arguments_that_rollout_has_not_are_told_where_they_belong(rig):
    with pytest.raises(RequestError, match="not an argument of rollout: give sampling_params=SamplingParams"):
        rig.rollout(max_tokens=5)
    with pytest.raises(RequestError, match="Unknown argument of rollout 'num_sample'. Did you mean 'num_samples'"):
        rig.rollout(num_sample=5)


def test_a_packed_rollout_holds_the_same_tokens(rig):
    padded, packed = rig.rollout(seed=1), rig.rollout(seed=1, layout="packed")
    assert torch.equal(packed["tokens", "full"][0], padded["tokens", "full"][padded["masks", "all_attention_mask"]])


def test_columns_reach_the_reward_function_and_the_batch(rig):
    calls = {}

    def reward(prompts, completions, completion_ids, answer, level):
        calls[prompts[0]] = (len(prompts), len(completions), answer, level)
        return [float(len(text)) for text in completions]

    columns = {"answer": ["A", "B", "C"], "level": (1, 2, 3)}
    batch = rig.rollout(num_samples=2, columns=columns, reward_fn=reward)
    assert calls == {p: (2, 2, [a] * 2, [k] * 2) for p, a, k in zip(PROMPTS, "ABC", (1, 2, 3), strict=True)}
    assert list(batch["answer"]) == ["A", "A", "B", "B", "C", "C"]
    assert batch["next", "reward"].flatten().tolist() == [float(len(text)) for text in batch["text", "response"]]
    assert torch.equal(batch["next", "done"], ~batch["truncated"])
    assert [not cut for cut in batch["truncated"]] == [reason == "stop" for reason in batch["finish_reason"]]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_each_function_of_a_list_has_its_rewards_in_the_batch(rig, layout, tmp_path):
    def odd(completion_ids, **kwargs):
        return [1.0 if len(ids) % 2 else None for ids in completion_ids]

    functions = {"reward_fn": [lengths, odd], "reward_weights": [0.5, 2.0]}
    batch = rig.rollout(num_samples=3, layout=layout, **functions)
    sizes = batch["next", "reward"].new_tensor([len(ids) for ids in (sampled_ids(batch, i) for i in range(9))])[:, None]
    assert torch.equal(batch["rewards", "lengths"], sizes)
    assert torch.equal(batch["rewards", "odd"].nan_to_num(0.0), sizes % 2)
    assert torch.equal(batch["rewards", "odd"].isnan(), sizes % 2 == 0)
    assert torch.equal(batch["next", "reward"], 0.5 * sizes + 2.0 * (sizes % 2))
    to_jsonl(batch, tmp_path / "file")
    line = json.loads((tmp_path / "file").read_text().splitlines()[0])
    assert line["rewards"] == {"lengths": sizes[0].item(), "odd": 1.0 if sizes[0] % 2 else None}


def test_weights_without_a_reward_function_are_refused(rig):
    with pytest.raises(RequestError, match="reward_weights=.1.0. is not allowed: must be absent without reward_fn"):
        rig.rollout(reward_weights=[1.0])


def test_each_group_is_rewarded_while_others_still_run(rig):
    still_running = []

    def reward(prompts, completions, completion_ids):
        still_running.append(rig.engine.get_num_unfinished_requests())
        return [0.0]

    rig.rollout(PROMPTS, [SamplingParams(max_tokens=k, ignore_eos=True) for k in (9, 1, 4)], reward_fn=reward)
    assert still_running == [2, 1, 0]


async def async_lengths(prompts, completions, completion_ids):
    await asyncio.sleep(0)
    return lengths(prompts, completions, completion_ids)


@pytest.mark.parametrize("reward_fn", [lengths, async_lengths])
def test_a_rollout_works_inside_a_running_loop(rig, reward_fn):
    async def notebook():
        return rig.rollout(num_samples=2, reward_fn=reward_fn)

    batch = asyncio.run(notebook())
    assert batch["next", "reward"].flatten().tolist() == batch["masks", "response"].sum(1).tolist()


def raises(*_):
    raise KeyError("gold")


async def raises_later(*_):
    raise KeyError("gold")


@pytest.mark.parametrize(
    "reward_fn,message",
    [
        (raises, r"prompts\[1\]: the reward function raised KeyError: 'gold'"),
        (raises_later, r"prompts\[1\]: the reward function raised KeyError: 'gold'"),
        (lambda *_: [float("nan")] * 2, r"prompts\[1\], sample 0: the reward is nan"),
        (lambda *_: [0.0], r"prompts\[1\]: the reward function returned 1 rewards, not 2"),
    ],
)
def test_a_bad_reward_names_its_prompt_and_ends_the_rollout(rig, reward_fn, message):
    params = [SamplingParams(max_tokens=k, n=2, ignore_eos=True) for k in (30, 1, 30)]
    with pytest.raises(RewardError, match=message):
        rig.rollout(PROMPTS, params, reward_fn=reward_fn)


def test_a_bad_reward_stops_the_sampling_at_once(rig):
    with pytest.raises(RewardError):
        rig.rollout(PROMPTS, [SamplingParams(max_tokens=k, ignore_eos=True) for k in (30, 1, 30)], reward_fn=raises)
    assert rig.executor.num_steps == 1


def test_a_reward_function_without_its_column_is_refused_before_anything_is_sampled(rig):
    def by_answer(completions, answer):
        raise AssertionError

    with pytest.raises(RewardError, match="'by_answer' needs 'answer', which is no column"):
        rig.rollout(PROMPTS, reward_fn=by_answer)
    assert rig.executor.num_steps == 0
    rig.assert_clean()


def test_an_interrupt_in_the_reward_function_leaves_nothing_behind(rig):
    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rig.rollout(reward_fn=interrupted)


def test_a_failed_sequence_ends_the_rollout_with_its_reason(make_rig):
    rig = make_rig(errors={3: "logits are NaN"})
    with pytest.raises(EngineGenerateError, match=r"prompts\[1\], sample 1: logits are NaN"):
        rig.rollout(num_samples=2)
    rig.assert_clean()
    assert rig.rollout().batch_size == (3,)


@pytest.mark.parametrize(
    "prompts,options,message",
    [
        (["fine", ""], {}, r"prompts\[1\]: prompt"),
        (["fine", [1, VOCAB_SIZE]], {}, r"prompts\[1\]: prompt_token_ids\[1\]=259"),
        (["fine", "x" * 80], {}, r"prompts\[1\]: prompt='80 tokens'"),
        (PROMPTS, {"layout": "ragged"}, "layout='ragged'"),
        (PROMPTS, {"columns": {"answer": [1]}}, r"columns\['answer'\]"),
        (PROMPTS, {"num_samples": 10**9}, "num_samples=1000000000"),
    ],
)
def test_a_refused_rollout_queues_nothing(rig, prompts, options, message):
    with pytest.raises(RequestError, match=message):
        rig.rollout(prompts, **options)
    assert rig.executor.num_steps == 0


def test_a_reward_function_that_steps_the_engine_takes_no_result_of_the_rollout(rig):
    stepped = []

    def step_on(prompts, completions, completion_ids):
        stepped.extend(rig.engine.step() for _ in range(3))
        return [0.0] * len(completions)

    params = [SamplingParams(max_tokens=k, ignore_eos=True) for k in (1, 5, 5)]
    batch = rig.rollout(PROMPTS, params, reward_fn=step_on)
    assert batch["masks", "response"].sum(dim=1).tolist() == [1, 5, 5] and stepped == [[]] * 9


def test_nothing_is_printed_without_a_progress_bar(rig, capfd):
    rig.rollout()
    assert capfd.readouterr() == ("", "")
    rig.rollout(use_tqdm=True)
    assert "rollout: 100%" in capfd.readouterr().err


def test_one_line_is_logged(rig, caplog):
    with caplog.at_level("INFO", logger="rollout_engine"):
        rig.rollout(reward_fn=lengths)
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("rollout of 3 prompts")]


def test_rollouts_in_several_threads_get_their_own_results(rig):
    expected = rig.rollout(seed=0, num_samples=2)["tokens", "full"]
    results = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: rig.rollout(seed=0, num_samples=2)})) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(torch.equal(results[i]["tokens", "full"], expected) for i in range(4))


def test_without_a_tokenizer_prompts_are_ids_and_padding_is_zero(make_rig):
    batch = make_rig(codec=None).rollout([[5, 6], [7]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert batch["tokens", "prompt"].tolist() == [[5, 6], [0, 7]]


def test_tokens_and_masks_are_enough_to_score(rig):
    batch = rig.rollout(num_samples=2, seed=4)
    assert torch.equal(rig.policy.score(batch.select("tokens", "masks")), rig.policy.score(batch))


@pytest.mark.parametrize(
    ("wrong", "options", "match"),
    [
        (lambda batch: [[1, 2], [3]], {}, r"batch=\[\[1, 2\], \[3\]\] .*a TensorDict .*LLM.score\(prompt_token_ids, "),
        (lambda batch: batch["tokens", "full"], {}, "batch=tensor.* must be a TensorDict as RolloutPolicy.rollout"),
        (lambda batch: batch.select("tokens"), {}, r"batch.keys\(\)=\['tokens'\] .* with \['masks'\]. Keep all keys"),
        (lambda batch: batch, {"replay_routing": True}, r"with \['routed_experts'\]"),
        (lambda batch: batch[0], {}, r"batch.batch_size=\[\] .* \[number of sequences\]"),
    ],
    ids=["lists", "a tensor", "keys", "routing", "one row"],
)
def test_only_rollouts_are_scored(rig, wrong, options, match):
    batch = rig.rollout(num_samples=2, seed=4)
    with pytest.raises(RequestError, match=match):
        rig.policy.score(wrong(batch), **options)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_scores_stand_under_the_sampled_tokens(rig, layout):
    batch = rig.rollout(num_samples=2, seed=4, layout=layout)
    scores = rig.policy.score(batch, temperature=0.5)
    assert scores.shape == batch["log_probs", "full"].shape and scores.dtype == torch.float32
    assistant = batch["masks", "all_assistant_mask"]
    assert (scores[~assistant] == 0).all()
    if layout == "padded":
        positions = torch.arange(scores.shape[1]).expand_as(scores)
    else:
        positions = torch.cat([torch.arange(n) for n in batch["cu_seqlens"].diff().tolist()])[None]
    assert torch.equal(scores[assistant], -2.0 * positions[assistant])


def test_every_seed_of_a_batch_replays_its_row_as_it_stands(rig):
    batch = rig.rollout(num_samples=16)
    assert (batch["seed"] < 0).any() and (batch["seed"] > 0).any()
    prompts = [text for text in batch["text", "prompt"]]
    params = [SamplingParams(seed=int(seed), n=1, max_tokens=6) for seed in batch["seed"]]
    replayed = rig.rollout(prompts, params)
    assert torch.equal(replayed["tokens", "full"], batch["tokens", "full"])
    assert torch.equal(replayed["seed"], batch["seed"])
