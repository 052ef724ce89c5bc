"""TorchRL's clients of SGLang's server, as they are: the service, the wrapper inside a collector's policy."""

import pytest

pytest.importorskip("torchrl.modules.llm.backends.sglang")

import numpy as np  # noqa: E402
from tensordict import TensorDict, lazy_stack  # noqa: E402
from torchrl.modules.llm import Text  # noqa: E402
from torchrl.modules.llm.backends.sglang import AsyncSGLang  # noqa: E402
from torchrl.modules.llm.policies.sglang_wrapper import SGLangWrapper  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

CLIENT = "torchrl"
# TorchRL's own use of what it depends on.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
PROMPTS = ["hello", "the sky is"]


def test_the_service_generates_with_log_probs(url):
    service = AsyncSGLang.connect(url)
    assert service.get_tp_size() == 1
    params = {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True}
    answers = service.generate(PROMPTS, params, return_logprob=True)
    for answer in answers:
        logprobs, ids, _ = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
        assert list(ids) == answer["output_ids"] and len(ids) == 4 and all(value <= 0 for value in logprobs)
    service.flush_cache()


def test_the_wrapper_gives_the_engines_own_log_probs(url, checkpoint, score):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.padding_side = "left"
    policy = SGLangWrapper(
        url,
        tokenizer=tokenizer,
        input_mode="text",
        generate=True,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": 5, "temperature": 1.0},
        pad_output=False,
    )
    asked = lazy_stack([TensorDict(text=Text(prompt=prompt)) for prompt in PROMPTS])
    given = policy(asked)
    for prompt, row in zip(PROMPTS, given.unbind(0), strict=True):
        ids, found = row["tokens", "response"].tolist(), row["log_probs", "response"].numpy()
        expected = score(tokenizer.encode(prompt, add_special_tokens=False), ids)
        assert np.array_equal(found, np.array(expected, np.float32))
