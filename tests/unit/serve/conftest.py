"""A policy with a tokenizer, behind the application in this process."""

import asyncio
import json

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import RolloutPolicy
from rollout_engine.serve.app import App
from rollout_engine.serve.options import ServeOptions
from rollout_engine.testing import tiny_checkpoint


@pytest.fixture(scope="package")
def policy(tmp_path_factory):
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("served"))
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=256, seed=3) as made:
        yield made


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory):
    """Of engines whose weights a test changes."""
    return tiny_checkpoint(tmp_path_factory.mktemp("updated"))


@pytest.fixture(scope="package")
def other_weights(checkpoint):
    """The weights of another version, by name."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Client:
    """Sends requests to an application, each in an event loop of its own."""

    def __init__(self, app):
        self.app = app

    def send(self, method, path, body=None, **options):
        """The response; `body` is sent as JSON."""

        async def exchange():
            transport = httpx2.ASGITransport(self.app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, **({} if body is None else {"json": body}), **options)

        return asyncio.run(exchange())

    def post(self, path, body=None, **options):
        """The JSON of a response of status 200."""
        response = self.send("POST", path, body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path, body):
        """The events of a streamed response."""
        response = self.send("POST", path, {**body, "stream": True})
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def named_events(self, path, body):
        """The events of a streamed response, each of which is sent under its type."""
        response = self.send("POST", path, {**body, "stream": True})
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        found = []
        for event in response.text.removesuffix("\n\n").split("\n\n"):
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found

    def problem(self, path, body=None, *, status=400, method="POST", **options):
        """The error of a response."""
        response = self.send(method, path, body, **options)
        assert response.status_code == status, response.text
        return response.json()["error"]


@pytest.fixture(scope="package")
def client(policy):
    return Client(App(policy, ServeOptions(served_model_name="tiny", trust_request_chat_template=True)))
