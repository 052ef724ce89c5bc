"""The model class of lm-eval and the provider of Inspect that sample in this process."""

import asyncio
import tomllib
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("inspect_ai")

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import GenerateConfig, get_model  # noqa: E402
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402

import envs_adapters.evaluation.inspect_ai as provider  # noqa: E402
from envs_adapters.evaluation.lm_eval import RolloutLM  # noqa: E402
from rollout_engine.errors import RequestError  # noqa: E402

PAIRS = [("The sky is", " blue"), ("The sky is", " green"), ("", "Two"), ("x", "y")]


def asked(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def harness(policy):
    return RolloutLM(policy, max_gen_toks=12)


def test_log_likelihoods_are_the_policys(harness, score, ids_of):
    found = harness.loglikelihood(asked("loglikelihood", PAIRS), disable_tqdm=True)
    for (context, continuation), (loglikelihood, is_greedy) in zip(PAIRS, found, strict=True):
        before = ids_of(context) or [harness.prefix_token_id]
        assert loglikelihood == sum(score(before, ids_of(continuation)))
        assert is_greedy in (True, False)


def test_the_greedy_continuation_is_known_as_greedy(harness, text_of, ids_of):
    pairs = [(context, text_of(context, max_tokens=1)) for context in "abcdefghijklmnopqrst"]
    pairs = [(context, text) for context, text in pairs if text.isascii() and text.isprintable() and text.strip()]
    assert pairs
    found = harness.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
    assert [is_greedy for _, is_greedy in found] == [True] * len(pairs)


def test_rolling_log_likelihoods_are_those_of_the_whole_text(harness, score, ids_of):
    text = "The sky is blue today."
    [found] = harness.loglikelihood_rolling(asked("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    assert found == pytest.approx(sum(score([harness.prefix_token_id], ids_of(text))))


def test_texts_end_where_the_task_says(harness, text_of):
    until = {"until": ["\n", "e"], "max_gen_toks": 12}
    found = harness.generate_until(asked("generate_until", [("hello", until), ("hi", {})]), disable_tqdm=True)
    assert found == [text_of("hello", max_tokens=12, stop=["\n", "e"]), text_of("hi", max_tokens=12)]
    with pytest.raises(RequestError, match="Did you mean 'temperature'"):
        harness.generate_until(asked("generate_until", [("hello", {"temprature": 1})]), disable_tqdm=True)


def test_conversations_use_the_template(harness):
    text = harness.apply_chat_template([{"role": "user", "content": "hello"}])
    assert "hello" in text and harness.tok_encode(text)


def test_the_provider_is_an_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["inspect_ai"] == {"rollout_engine": provider.__name__}


@pytest.fixture
def model(policy):
    return get_model("rollout_engine/live", policy=policy, memoize=False)


def ask(model, **settings):
    return asyncio.run(model.generate("hello", config=GenerateConfig(max_tokens=6, **settings)))


def test_answers_are_the_policys(model, text_of):
    output = ask(model, temperature=1.0, seed=5)
    messages = [{"role": "user", "content": "hello"}]
    assert output.completion == text_of({"messages": messages}, max_tokens=6, temperature=1.0, seed=5)
    assert output.stop_reason == "max_tokens" and output.usage.output_tokens == 6


def test_choices_come_with_log_probs(model):
    output = ask(model, logprobs=True, num_choices=2, seed=5, top_p=0.9, stop_seqs=["zzz"])
    assert len(output.choices) == 2
    assert all(len(choice.logprobs.content) == 6 for choice in output.choices)


def test_an_evaluation_is_scored(model, text_of, tmp_path):
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 6}
    answers = [text_of({"messages": [{"role": "user", "content": text}]}, **settings) for text in "ab"]
    samples = [Sample(input="a", target=answers[0][:3]), Sample(input="b", target="not to be found")]
    task = Task(dataset=samples, solver=generate(), scorer=includes(ignore_case=False))
    [log] = eval(task, model=model, log_dir=str(tmp_path), display="none", **settings)
    assert log.status == "success", log.error
    assert [sample.scores["includes"].value for sample in log.samples] == ["C", "I"]
