"""POST /api/v1/asample: samples of token ids, by a future."""

from functools import partial
from typing import Any, Literal

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_request import LoRARequest
from rollout_engine.base.outputs import RequestOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.threads import run_in_thread
from rollout_engine.results.open_streams import Stream
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served
from rollout_engine.serve.tinker.clients import Sampler
from rollout_engine.serve.tinker.futures import Pending, Ticket
from rollout_engine.serve.tinker.messages import PROTOBUF, sample_message

UNSERVED: dict[str, tuple[Any, ...]] = {
    "target_prompt_logprobs": (),
    "prompt_alt_tokens_k": (0,),
    "record_stability_info": (False,),
}
"""Fields of Tinker's that are not served -> the values that ask for nothing."""


class Chunk(msgspec.Struct, kw_only=True):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt."""

    chunks: list[Chunk]

    def token_ids(self) -> list[int]:
        """Its ids. Raises `RequestError` for a chunk that has none."""
        for i, chunk in enumerate(self.chunks):
            if chunk.type != "encoded_text":
                bound = "'encoded_text': prompts are token ids here"
                raise RequestError.for_field(f"prompt.chunks[{i}].type", chunk.type, bound)
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling settings as Tinker names them."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    """None: the checkpoint's own end ids; []: none at all."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a request."""

    prompt: ModelInput
    sampling_params: SamplingFields
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: int | None = None
    """Number of the request within its sampler: sent again, it is the same request."""
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    """Score the last of the prompt's tokens alone; None: all."""
    type: Literal["sample"] = "sample"


async def sample(served: Served, asked: Asked) -> Reply:
    """Queue a prompt; `retrieve_future` has its samples."""
    tinker, body = served.tinker.require_on(), asked.body
    assert isinstance(body, SampleBody)
    served.check_open()
    if body.sampling_session_id is None or body.seq_id is None:
        bound = "given with seq_id: create_sampling_session returns one"
        raise RequestError.for_field("sampling_session_id", body.sampling_session_id, bound)
    sampler = tinker.clients.find_sampler(body.sampling_session_id)
    request_id = f"{sampler.id}:{body.seq_id}"
    if tinker.futures.find(request_id) is None:
        await _queue(served, body, sampler, request_id)
    ids = [f"{request_id}:{i}" for i in range(body.num_samples)]
    return Reply(Ticket(request_id, sample_sequence_ids=ids))


async def _queue(served: Served, body: SampleBody, sampler: Sampler, request_id: str) -> None:
    token_ids, params, adapter = body.prompt.token_ids(), _params_of(served, body), sampler.adapter()
    scored = body.prompt_logprobs_last_n
    if scored is not None and not (body.prompt_logprobs and 1 <= scored < len(token_ids)):
        bound = f"in [1, {len(token_ids) - 1}], with prompt_logprobs"
        raise RequestError.for_field("prompt_logprobs_last_n", scored, bound)
    pending = served.tinker.futures.add(sampler.client_id, request_id)
    try:
        stream = await run_in_thread(_add, served, token_ids, params, adapter, pending)
    except BaseException:
        served.tinker.futures.drop(pending)
        raise
    pending.finish = partial(_write, served, stream, scored)
    pending.abandon = partial(served.engine.frontend.close, stream)
    if served.tinker.futures.find(request_id) is not pending:  # its session has ended meanwhile
        served.engine.frontend.close(stream)


def _add(
    served: Served,
    token_ids: list[int],
    params: SamplingParams,
    adapter: LoRARequest | None,
    pending: Pending,
) -> Stream:
    """Queue a request; its outcome is set once it has ended."""

    def wake(stream: Stream) -> None:
        """Set the outcome once all samples have ended: a reader is woken by each that ends."""
        if (stream.error is not None or stream.request.num_live == 0) and not pending.outcome.done():
            pending.outcome.set_result((None, None))

    frontend, prompt = served.engine.frontend, {"prompt_token_ids": token_ids}
    if adapter is None:
        return frontend.add_request(prompt, params, None, wake)
    with served.tinker.adding:  # no other adapter takes its slot before it is in use
        frontend.ensure_loras(adapter)
        return frontend.add_request({**prompt, "lora_request": adapter.name}, params, None, wake)


def _write(served: Served, stream: Stream, scored: int | None, _: None) -> Reply:
    output = served.engine.frontend.take(stream)
    assert isinstance(output, RequestOutput), "its stream was woken by its end"
    for one in output.outputs:
        if one.finish_reason not in ("stop", "length"):
            raise HttpProblem(500, f"A sample ended with '{one.finish_reason}': {one.error or 'it was aborted'}")
    return Reply(sample_message(output, scored), content_type=PROTOBUF)


def _params_of(served: Served, body: SampleBody) -> SamplingParams:
    """The settings of a request. Raises `RequestError`."""
    given, options = body.sampling_params, dict[str, Any]()
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    if stop == []:
        options["ignore_eos"] = True
    elif stop:
        texts = [each for each in stop if isinstance(each, str)]
        if texts and len(texts) < len(stop):
            raise RequestError.for_field("sampling_params.stop", stop, "texts, or token ids")
        options["stop" if texts else "stop_token_ids"] = stop
    if body.prompt_logprobs or body.topk_prompt_logprobs:
        options["prompt_logprobs"] = body.topk_prompt_logprobs
    return SamplingParams(
        n=body.num_samples,
        max_tokens=given.max_tokens,
        seed=given.seed,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        logprobs=body.topk_sample_logprobs,
        logprobs_mode=served.options.logprobs_mode,
        detokenize="stop" in options,
        output_kind="final_only",
        **options,
    )
