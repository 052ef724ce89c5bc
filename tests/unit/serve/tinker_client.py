"""A client of Tinker's protocol for tests: what its SDK sends, and its messages read back."""

import asyncio
import struct

import numpy as np

from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.serve.tinker.protobuf import bytes_field, double_field, number_field, read_message


class TinkerClient:
    """One session over a `Client`."""

    def __init__(self, client):
        self.client = client
        self.session = client.post("/api/v1/create_session", {"tags": [], "sdk_version": "0"})["session_id"]
        self.num_samplers = self.num_sent = 0

    def post(self, name, body=None, status=200, **options):
        """The JSON of a response to /api/v1/{name}."""
        response = self.client.send("POST", f"/api/v1/{name}", body, **options)
        assert response.status_code == status, response.text
        return response.json()

    def sampler(self, **source):
        """The id of a new sampler."""
        self.num_samplers += 1
        body = {
            "session_id": self.session,
            "sampling_session_seq_id": self.num_samplers,
            **(source or {"base_model": "tiny"}),
        }
        return self.post("create_sampling_session", body)["sampling_session_id"]

    def ask(self, sampler, token_ids, num_samples=1, *, status=200, seq_id=None, params=None, **more):
        """Queue a sample; the ticket."""
        self.num_sent += 1
        prompt = {"chunks": [{"type": "encoded_text", "tokens": token_ids}]}
        settings = {"max_tokens": 4, "seed": 7, "temperature": 1.0, "top_k": -1, "top_p": 1.0, **(params or {})}
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq_id or self.num_sent,
            "prompt": prompt,
            "num_samples": num_samples,
        }
        return self.post("asample", body | {"sampling_params": settings, "type": "sample", **more}, status)

    def result(self, ticket):
        """The result of a ticket: fields of a message by their numbers, or JSON."""
        response = self.client.send("POST", "/api/v1/retrieve_future", {"request_id": ticket["request_id"]})
        assert response.status_code == 200, response.text
        is_message = response.headers["content-type"] == "application/x-protobuf"
        return fields(response.content) if is_message else response.json()

    def sample(self, *args, **more):
        """The sequences of a sample, as (token ids, log-probs), and the fields of its message."""
        message = self.result(self.ask(*args, **more))
        read = [fields(each) for each in message[1]]
        found = [(np.frombuffer(each[2][0], "<i4").tolist(), np.frombuffer(each[3][0], "<f4")) for each in read]
        return found, message

    def model(self, **config):
        """Begin an adapter; its id."""
        body = {
            "session_id": self.session,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 4, "seed": 1, **config},
        }
        return self.result(self.post("create_model", body))["model_id"]

    def run(self, model, seq_id, examples, loss="cross_entropy", **more):
        """The result of a pass: (log-probs of each example, loss), or the JSON of its failure."""
        ticket = self.send_pass(model, seq_id, examples, loss, **more).json()
        found = self.result(ticket)
        if "error" in found:
            return found
        record = fields(found[2][0])
        [entry] = record[2]
        batched = fields(fields(entry)[2][0])
        values, ends = np.frombuffer(batched[1][0], "<f4"), np.frombuffer(batched[2][0], "<i8") // 4
        [metric] = found[3]
        (loss_sum,) = struct.unpack("<d", fields(metric)[2][0])
        return [values[a:b] for a, b in zip(ends, ends[1:], strict=False)], loss_sum

    def send_pass(self, model, seq_id, examples, loss="cross_entropy", config=None, forward_only=False):
        """The response to a pass; `examples`: pairs of token ids and inputs by name."""
        data = b"".join(bytes_field(3, example(*each)) for each in examples)
        settings = b"".join(
            bytes_field(5, bytes_field(1, name.encode()) + double_field(2, value))
            for name, value in (config or {}).items()
        )
        body = (
            bytes_field(1, model.encode()) + number_field(2, seq_id) + data + bytes_field(4, loss.encode()) + settings
        )
        body += number_field(6, int(forward_only))
        return self.client.send("POST", "/api/v1/forward_backward", content=body)

    def step(self, model, seq_id, **adam):
        """The result of a step of the optimizer."""
        params = {"learning_rate": 0.01, **adam}
        return self.result(self.post("optim_step", {"model_id": model, "seq_id": seq_id, "adam_params": params}))


def own_output(policy, token_ids, params, lora=None):
    """The engine's own result for a prompt."""
    prompt = {"prompt_token_ids": token_ids} | ({} if lora is None else {"lora_request": lora})

    async def ask():
        async for output in AsyncLLM.from_engine(policy).generate(prompt, params):
            if output.finished:
                return output

    return asyncio.run(ask())


def example(token_ids, inputs):
    """A Datum."""
    chunk = bytes_field(1, bytes_field(1, bytes_field(1, np.array(token_ids, "<i4").tobytes())))
    entries = b""
    for name, values in inputs.items():
        is_ids = name == "target_tokens"
        data = np.array(values, "<i8" if is_ids else "<f4").tobytes()
        tensor = bytes_field(1, data) + number_field(3, 2 if is_ids else 1) + bytes_field(4, bytes([len(values)]))
        entries += bytes_field(2, bytes_field(1, name.encode()) + bytes_field(2, tensor))
    return chunk + entries


def fields(data):
    """Fields of a message by their numbers: lists of integers or bytes."""
    found = {}
    for number, value in read_message(memoryview(data)):
        found.setdefault(number, []).append(value if isinstance(value, int) else bytes(value))
    return found
