"""Log-probs as dictionaries by token id, the form that users of other engines know."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rollout_engine.base.errors import RequestError
from rollout_engine.base.outputs import CompletionOutput, Logprob, RequestOutput
from rollout_engine.testing import byte_tokenizer


def completion(**fields):
    unset = dict.fromkeys(CompletionOutput.__struct_fields__)
    return CompletionOutput(**(unset | {"index": 0, "text": "", "token_ids": [5, 7], "version_spans": []} | fields))


def with_top(**fields):
    ids = np.array([[5, 6], [6, 5]], np.int32)
    values = np.array([[-0.5, -1.0], [-0.25, -2.0]], np.float32)
    sampled = {"logprobs": np.float32([-0.5, -3.0]), "sampled_ranks": np.array([1, 9], np.int32)}
    return completion(**(sampled | {"top_logprobs": (ids, values)} | fields))


def test_each_position_has_the_sampled_token_first_and_then_the_most_likely():
    first, second = with_top().logprob_dicts()
    assert first == {5: Logprob(-0.5, 1, None), 6: Logprob(-1.0, 2, None)}
    assert list(second) == [7, 6, 5]
    assert second[7] == Logprob(-3.0, 9, None)
    assert second[5] == Logprob(-2.0, 2, None)


def test_without_the_most_likely_there_is_the_sampled_token_alone():
    made = completion(logprobs=np.float32([-0.5, -3.0])).logprob_dicts()
    assert made == [{5: Logprob(-0.5, None, None)}, {7: Logprob(-3.0, None, None)}]


def test_columns_that_were_padded_are_left_out():
    ids = np.array([[5, -1], [6, -1]], np.int32)
    assert [len(found) for found in with_top(top_logprobs=(ids, np.zeros((2, 2)))).logprob_dicts()] == [1, 2]


def test_no_log_probs_are_an_error():
    with pytest.raises(RequestError, match=r"no log-probs. Ask for them: SamplingParams\(logprobs=...\)"):
        completion().logprob_dicts()


def test_decoded_tokens_keep_their_space_and_special_tokens_are_shown():
    vocab = {"</s>": 0, "\u2581he": 1, "llo": 2}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.Metaspace("\u2581")
    spaced = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    made = completion(token_ids=[1, 2, 0], logprobs=np.zeros(3, np.float32)).logprob_dicts(spaced)
    assert [next(iter(found.values())).decoded_token for found in made] == [" he", "llo", "</s>"]
    made = completion(token_ids=[74, 2], logprobs=np.zeros(2, np.float32)).logprob_dicts(byte_tokenizer())
    assert [next(iter(found.values())).decoded_token for found in made] == ["h", "<eos>"]


def prompt_of(token_ids, logprobs, top=None, ranks=None):
    unset = dict.fromkeys(RequestOutput.__struct_fields__)
    fields = {"prompt_token_ids": token_ids, "prompt_logprobs": logprobs, "prompt_top_logprobs": top}
    return RequestOutput(**(unset | fields | {"prompt_ranks": ranks}))


def test_prompts_have_the_same_form_and_none_for_the_first_token():
    top = np.array([[-1, -1], [6, 7], [5, 8]], np.int32), np.float32([[np.nan] * 2, [-0.5, -1.0], [-0.5, -1.0]])
    values, ranks = np.float32([np.nan, -1.0, -9.0]), np.array([0, 2, 211], np.int32)
    found = prompt_of([3, 7, 7], values, top, ranks).prompt_logprob_dicts()
    assert found[0] is None
    assert found[1] == {7: Logprob(-1.0, 2, None), 6: Logprob(-0.5, 1, None)}
    assert next(iter(found[1])) == 7
    assert found[2] == {7: Logprob(-9.0, 211, None), 5: Logprob(-0.5, 1, None), 8: Logprob(-1.0, 2, None)}
    alone = prompt_of([3, 7, 7], values, None, ranks).prompt_logprob_dicts()
    assert alone[1:] == [{7: Logprob(-1.0, 2, None)}, {7: Logprob(-9.0, 211, None)}]


def test_prompts_without_log_probs_are_an_error():
    with pytest.raises(RequestError, match=r"Ask for them: SamplingParams\(prompt_logprobs=...\)"):
        prompt_of([3], None).prompt_logprob_dicts()


def test_what_is_no_tokenizer_is_refused():
    with pytest.raises(RequestError, match="tokenizer='gpt2' is not allowed: must be a tokenizer, such as llm.get_tok"):
        with_top().logprob_dicts("gpt2")
