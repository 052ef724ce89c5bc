"""lm-eval: log-likelihoods by echo, texts until a stop, and conversations."""

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI  # noqa: E402

CLIENT = "lm_eval"
PAIRS = [("The sky is", " blue"), ("The sky is", " green"), ("Two and two make", " four."), ("x", "y")]
UNTIL = {"until": ["\n", "e"], "max_gen_toks": 12}


def asked(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


@pytest.fixture(params=["huggingface", "remote"])
def completions(request, url, checkpoint):
    """`local-completions` with the model's tokenizer of its own, and with the server's."""
    own = {"tokenizer": str(checkpoint)} if request.param == "huggingface" else {}
    address = f"{url}/v1/completions"
    return LocalCompletionsAPI(
        base_url=address, model="tiny", tokenizer_backend=request.param, batch_size=2, max_length=512, **own
    )


def test_log_likelihoods_are_the_policys_to_the_bit(completions, score, ids_of):
    found = completions.loglikelihood(asked("loglikelihood", PAIRS), disable_tqdm=True)
    assert len(found) == len(PAIRS)
    for (context, continuation), (loglikelihood, is_greedy) in zip(PAIRS, found, strict=True):
        assert loglikelihood == sum(score(ids_of(context), ids_of(continuation)))
        assert is_greedy in (True, False)


def test_the_greedy_continuation_is_known_as_greedy(completions, text_of):
    pairs = [(context, text_of(context, max_tokens=1)) for context in "abcdefghijklmnopqrst"]
    pairs = [(context, text) for context, text in pairs if text.isascii() and text.isprintable() and text.strip()]
    assert pairs
    found = completions.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
    assert [is_greedy for _, is_greedy in found] == [True] * len(pairs)


def test_rolling_log_likelihoods_are_those_of_the_whole_text(completions, score, ids_of):
    text = "The sky is blue today."
    [found] = completions.loglikelihood_rolling(asked("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    assert found == sum(score([completions.prefix_token_id], ids_of(text)))


def test_texts_end_where_the_task_says(completions, text_of):
    found = completions.generate_until(asked("generate_until", [("hello", dict(UNTIL))]), disable_tqdm=True)
    assert found == [text_of("hello", max_tokens=12, stop=["\n", "e"])]


def test_conversations_are_answered(url, text_of):
    model = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", model="tiny", max_length=512)
    context = model.apply_chat_template([{"role": "user", "content": "hello"}])
    found = model.generate_until(asked("generate_until", [(context, dict(UNTIL))]), disable_tqdm=True)
    messages = [{"role": "user", "content": "hello"}]
    assert found == [text_of({"messages": messages}, max_tokens=12, stop=["\n", "e"])]
