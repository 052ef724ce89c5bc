"""The model class of lm-eval and the provider of Inspect that sample in this process."""

import asyncio
import tomllib
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("inspect_ai")

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import (  # noqa: E402
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate  # noqa: E402
from inspect_ai.tool import ToolCall  # noqa: E402
from inspect_ai.util import JSONSchema  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402

import envs_adapters.evaluation.inspect_ai as provider  # noqa: E402
from envs_adapters.evaluation.lm_eval import RolloutLM  # noqa: E402
from rollout_engine import LLM, RolloutPolicy, SamplingParams  # noqa: E402
from rollout_engine.base.errors import RequestError  # noqa: E402
from rollout_engine.testing import (  # noqa: E402
    byte_tokenizer,
    random_picture,
    tiny_checkpoint,
    tiny_vision_checkpoint,
)

PAIRS = [("The sky is", " blue"), ("The sky is", " green"), ("", "Two"), ("x", "y")]

DATA_URL = "data:image/png;base64,aa"


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


LENGTH = 64
"""Context of the model below."""


@pytest.fixture(scope="module")
def checkpoint_with_bos(tmp_path_factory):
    """A model whose tokenizer begins each text with <bos>, as those of Llama, Mistral and Gemma do."""
    path = tiny_checkpoint(tmp_path_factory.mktemp("bos"))
    tokenizer = byte_tokenizer()
    [bos] = tokenizer.convert_tokens_to_ids(["<bos>"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def with_bos(checkpoint_with_bos):
    with RolloutPolicy.from_pretrained(checkpoint_with_bos, dtype="float32", max_model_len=LENGTH) as policy:
        yield policy


@pytest.fixture
def prompts_of(monkeypatch):
    """The prompts and parameters that a harness model asks the engine for."""

    def watch(model):
        asked, generate = [], model._llm.generate

        def spy(prompts, params, **options):
            asked.extend(
                (list(each["prompt_token_ids"]), p.max_tokens) for each, p in zip(prompts, params, strict=True)
            )
            return generate(prompts, params, **options)

        monkeypatch.setattr(model._llm, "generate", spy)
        return asked

    return watch


def test_texts_have_the_special_tokens_that_the_tokenizer_adds(with_bos, checkpoint_with_bos, prompts_of):
    ours = RolloutLM(with_bos)
    theirs = pytest.importorskip("lm_eval.models.huggingface").HFLM(
        pretrained=str(checkpoint_with_bos), device="cpu", dtype="float32", batch_size=1
    )
    pairs = asked("loglikelihood", PAIRS)
    found, expected = ours.loglikelihood(pairs, disable_tqdm=True), theirs.loglikelihood(pairs, disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    texts = asked("loglikelihood_rolling", [("The sky is blue today.",)])
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)
    prompts, settings = prompts_of(ours), {"max_gen_toks": 2}
    ours.generate_until(asked("generate_until", [("hi", settings), ("<bos>hi", settings)]), disable_tqdm=True)
    ids = with_bos.tokenizer.encode("hi")
    assert ids[0] == with_bos.tokenizer.bos_token_id and [prompt for prompt, _ in prompts] == [ids, ids]
    without = RolloutLM(with_bos, add_bos_token=False)
    assert without.tok_encode("hi") == ids[1:] and without.tok_encode("hi", add_special_tokens=True) == ids


@pytest.mark.parametrize(
    ("length", "budget", "kept", "num_tokens"),
    [
        (20, 16, 20, 16),
        (20, 50, 20, LENGTH - 20),  # the answer is shortened, not the prompt
        (20, LENGTH, 20, LENGTH - 20),
        (20, 100_000, 20, LENGTH - 20),
        (60, 16, LENGTH - 16, 16),  # the prompt, as the harness' own models cut it
        (60, 100_000, LENGTH // 2, LENGTH // 2),
        (500, 40, LENGTH // 2, LENGTH // 2),
    ],
)
def test_a_budget_never_takes_more_than_half_of_the_context_from_the_prompt(
    with_bos, prompts_of, caplog, length, budget, kept, num_tokens
):
    model = RolloutLM(with_bos)
    prompts, text = prompts_of(model), "x" * (length - 1)
    model.generate_until(asked("generate_until", [(text, {"max_gen_toks": budget})]), disable_tqdm=True)
    [(ids, given)] = prompts
    assert (ids, given) == (with_bos.tokenizer.encode(text)[-kept:], num_tokens)
    numbers = f"{int(kept < length)} prompts were cut to their ends and {int(num_tokens < budget)} max_gen_toks lowered"
    assert (numbers in caplog.text) == (kept < length or num_tokens < budget)


@pytest.mark.parametrize("length", [LENGTH - 3, LENGTH - 2, LENGTH - 1, LENGTH, 2 * LENGTH - 2, 3 * LENGTH + 5])
def test_rolling_windows_count_every_token_once(with_bos, length, monkeypatch):
    model = RolloutLM(with_bos)
    score, scored = model._llm.score, []

    def spy(contexts, continuations):
        scored.extend(zip(contexts, continuations, strict=True))
        return score(contexts, continuations)

    monkeypatch.setattr(model._llm, "score", spy)
    text = "".join(chr(ord("a") + i * i % 26) for i in range(length - 1))
    [found] = model.loglikelihood_rolling(asked("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    ids = model.tok_encode(text)
    assert len(ids) == length and [token for _, counted in scored for token in counted] == ids
    assert max(len(context) + len(counted) for context, counted in scored) == min(LENGTH, length + 1)
    expected = [score([context], [counted])[0].tolist() for context, counted in scored]
    assert found == pytest.approx(sum(map(sum, expected)))


def test_a_continuation_that_does_not_fit_is_refused(with_bos):
    model = RolloutLM(with_bos)
    with pytest.raises(RequestError, match=f"must be shorter than {LENGTH - 1} tokens"):
        model.loglikelihood(asked("loglikelihood", [("a", "b" * LENGTH)]), disable_tqdm=True)
    [(found, _)] = model.loglikelihood(asked("loglikelihood", [("a" * LENGTH, "b" * 9)]), disable_tqdm=True)
    [values] = model._llm.score([model.tok_encode("a" * LENGTH)[-(LENGTH - 10) :]], [[*b"b" * 9]])
    assert len(values) == 9 and found < 0


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


def test_choices_come_with_the_likeliest_tokens(model):
    [choice] = ask(model, top_logprobs=3, temperature=1.0, seed=5).choices
    assert len(choice.logprobs.content) == 6
    for each in choice.logprobs.content:
        values = [top.logprob for top in each.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) and values[0] >= each.logprob


def test_a_response_schema_is_a_grammar(model):
    schema = ResponseSchema(name="x", json_schema=JSONSchema(type="boolean"))
    assert ask(model, response_schema=schema).completion.strip() in ("true", "false")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (ChatMessageUser(content=[ContentText(text="a"), ContentImage(image=DATA_URL)]), "no pictures"),
        (ChatMessageUser(content=[ContentImage(image=DATA_URL, detail="low")]), "detail of an image"),
        (ChatMessageAssistant(content=[ContentReasoning(reasoning="hm"), ContentText(text="a")]), "'reasoning'"),
        (ChatMessageTool(content="3", tool_call_id="1"), "tools=.* Use the HTTP server"),
        (
            ChatMessageAssistant(content="", tool_calls=[ToolCall(id="1", function="add", arguments={})]),
            r"tools=\['add'\]",
        ),
    ],
)
def test_messages_that_are_not_text_are_refused(model, message, told):
    with pytest.raises(RequestError, match=told):
        asyncio.run(model.api.generate([message], [], "none", GenerateConfig()))


@pytest.mark.parametrize("setting", [{"best_of": 2}, {"reasoning_effort": "low"}, {"extra_body": {"min_p": 0.1}}])
def test_settings_that_would_be_ignored_are_refused(model, setting):
    with pytest.raises(RequestError, match=f"{next(iter(setting))}=.* must be left out"):
        asyncio.run(model.api.generate([ChatMessageUser(content="a")], [], "none", GenerateConfig(**setting)))


def test_text_in_parts_is_text(model):
    parts = ChatMessageUser(content=[ContentText(text="hello")])
    settings = GenerateConfig(max_tokens=6, temperature=1.0, seed=5)
    found = asyncio.run(model.api.generate([parts], [], "none", settings))
    assert found.completion == ask(model, temperature=1.0, seed=5).completion


def test_a_conversation_that_does_not_fit_ends_by_the_models_length(with_bos):
    model = get_model("rollout_engine/live", policy=with_bos, memoize=False)

    def answer(text, **settings):
        message = ChatMessageUser(content=text)
        settings = GenerateConfig(logit_bias={with_bos.tokenizer.eos_token_id: -100.0}, seed=1, **settings)
        output = asyncio.run(model.api.generate([message], [], "none", settings))
        return output.stop_reason, output.usage and output.usage.output_tokens

    assert answer("x" * 500, max_tokens=4) == ("model_length", None)
    one = asyncio.run(model.api.generate([ChatMessageUser(content="x")], [], "none", GenerateConfig(max_tokens=1)))
    room = LENGTH - one.usage.input_tokens
    assert answer("x", max_tokens=4) == ("max_tokens", 4)
    assert answer("x", max_tokens=room) == ("max_tokens", room)
    assert answer("x", max_tokens=1000) == answer("x") == ("model_length", room)


def test_an_evaluation_is_scored(model, text_of, tmp_path):
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 6}
    answers = [text_of({"messages": [{"role": "user", "content": text}]}, **settings) for text in "ab"]
    samples = [Sample(input="a", target=answers[0][:3]), Sample(input="b", target="not to be found")]
    task = Task(dataset=samples, solver=generate(), scorer=includes(ignore_case=False))
    [log] = eval(task, model=model, log_dir=str(tmp_path), display="none", **settings)
    assert log.status == "success", log.error
    assert [sample.scores["includes"].value for sample in log.samples] == ["C", "I"]


def test_images_are_pictures_of_the_prompt(tmp_path):
    path = tiny_vision_checkpoint(tmp_path, "llava")
    random_picture(1).save(tmp_path / "shown.png")
    content = [ContentImage(image=str(tmp_path / "shown.png")), ContentText(text="What is it?")]
    parts = [{"type": "image", "image": random_picture(1)}, {"type": "text", "text": "What is it?"}]
    settings = dict(max_tokens=6, temperature=0.0)
    with LLM(path, dtype="float32") as llm:
        params = SamplingParams(max_tokens=6, temperature=0.0, seed=0)
        (wanted,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    with RolloutPolicy.from_pretrained(path, dtype="float32") as policy:
        model = get_model("rollout_engine/live", policy=policy, memoize=False)
        output = asyncio.run(model.generate([ChatMessageUser(content=content)], config=GenerateConfig(**settings)))
    assert output.completion == wanted.outputs[0].text
    assert output.usage.input_tokens == len(wanted.prompt_token_ids)
