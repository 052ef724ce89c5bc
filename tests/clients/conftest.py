"""One server for each client's tests. With RECORD=1 its requests become a transcript, which `make test` replays."""

import asyncio
import importlib.metadata
import os

import numpy as np
import pytest

from rollout_engine import RolloutPolicy, SamplingParams
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer
from tests.transcripts import recording, save, served_checkpoint

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return served_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=2048, seed=3) as made:
        yield made


@pytest.fixture
def ids_of(policy):
    """The token ids of a text, without special tokens."""
    return lambda text: policy.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def text_of(policy):
    """The policy's own answer to a prompt; the most likely one, unless settings say otherwise."""

    async def ask(prompt, settings):
        engine = AsyncLLM.from_engine(policy)
        async for output in engine.generate(prompt, SamplingParams(**{"temperature": 0, **settings})):
            if output.finished:
                return output.outputs[0].text

    return lambda prompt, **settings: asyncio.run(ask(prompt, settings))


@pytest.fixture
def score(policy):
    """The policy's own log-probs of a completion, as the floats that JSON would carry."""

    def ask(prompt_token_ids, token_ids, temperature=1.0):
        engine = AsyncLLM.from_engine(policy)
        [scored] = asyncio.run(engine.score([prompt_token_ids], [token_ids], temperature=temperature))
        return np.asarray(scored, np.float32).tolist()

    return ask


@pytest.fixture(scope="module")
def url(request, policy, checkpoint):
    """Where the server of this module's client listens. The module's `CLIENT` is the client's package."""
    client = request.module.CLIENT
    with recording(checkpoint) as calls:
        with HttpServer(policy, ServeOptions(port=0, served_model_name="tiny")) as server:
            yield server.url
    if os.environ.get("RECORD") == "1" and not request.session.testsfailed:
        save(client, f"{client} {importlib.metadata.version(client)}", calls)
