"""Handlers of Tinker's training: each queues work for the one thread that trains, by a future."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollout_engine.base.errors import RequestError
from rollout_engine.base.lora_training import AdamStep, LoraShape, LoraTrainer
from rollout_engine.base.threads import run_in_thread
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.route import Asked, Reply
from rollout_engine.serve.served import Served
from rollout_engine.serve.tinker.checkpoints import About, Checkpoint, Kind
from rollout_engine.serve.tinker.clients import KEPT_SNAPSHOTS, Client, Sampler, TrainedModel
from rollout_engine.serve.tinker.futures import Ticket
from rollout_engine.serve.tinker.handlers import model_names
from rollout_engine.serve.tinker.messages import PROTOBUF, PassRequest, model_of_pass, pass_message, read_pass
from rollout_engine.serve.tinker.service import TinkerService


class LoraFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A LoraConfig of Tinker's."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def shape(self) -> LoraShape:
        """The adapter that is trained: none of the unembedding."""
        return LoraShape(rank=self.rank, seed=self.seed, train_mlp=self.train_mlp, train_attn=self.train_attn)


class OptimizerFields(msgspec.Struct, kw_only=True):
    """The optimizer of a model."""

    type: str = "adamw"


async def create_model(
    served: Served,
    asked: Asked,
    *,
    session_id: str,
    model_seq_id: int,
    base_model: str,
    lora_config: LoraFields | None = None,
    optimizer_config: OptimizerFields | None = None,
    user_metadata: dict[str, Any] | None = None,
    type: Literal["create_model"] = "create_model",
) -> Reply:
    """Begin an adapter, which its client trains."""
    tinker = served.tinker.require_on()
    client, shape = tinker.clients.get(session_id), (lora_config or LoraFields()).shape()
    model_id = f"{client.id}:train:{model_seq_id}"
    if tinker.futures.find(f"{model_id}:0") is not None:
        return Reply(Ticket(f"{model_id}:0", model_id=model_id))
    served.check_model(base_model)
    model = TrainedModel(model_id, shape, user_metadata=_texts(user_metadata))
    answer = {"model_id": model_id, "type": type}
    return _begin_model(tinker, client, model, optimizer_config, lambda: answer)


async def get_info(served: Served, asked: Asked, *, model_id: str, type: Literal["get_info"] = "get_info") -> Reply:
    """The model that an adapter is of."""
    _, model = served.tinker.require_on().clients.find_model(model_id)
    names = model_names(served)
    about = {"is_lora": True, "lora_rank": model.shape.rank, "model_name": served.model}
    return Reply({"type": type, "model_data": names, "model_id": model_id, **about})


async def unload_model(
    served: Served, asked: Asked, *, model_id: str, type: Literal["unload_model"] = "unload_model"
) -> Reply:
    """Free an adapter; its checkpoints stay."""
    tinker = served.tinker.require_on()
    client, model = tinker.clients.find_model(model_id)
    request_id = f"{model_id}:unload"
    tinker.unload(client)
    tinker.queue(client, request_id, lambda: {"model_id": model.id, "type": type})
    return Reply(Ticket(request_id, model_id=model_id))


async def forward_backward(served: Served, asked: Asked) -> Reply:
    """Compute a loss and its gradients, which add up until the next step."""
    tinker = served.tinker.require_on()
    try:
        found = await asked.read_fields(read_pass, asked.body)
    except RequestError as problem:
        tinker.clients.find_model(model_of_pass(asked.body))[1].failure = str(problem)
        raise
    client, model = tinker.clients.find_model(found.model_id)
    losses = tinker.trainer.losses
    if found.loss_fn not in losses:
        bound = f"one of {', '.join(map(repr, losses))}: no other loss is computed here"
        raise RequestError.for_field("loss_fn", found.loss_fn, bound)
    return _queue(tinker, client, model, found.seq_id, partial(_run_pass, tinker.trainer, model, found))


def _run_pass(trainer: LoraTrainer, model: TrainedModel, found: PassRequest) -> Reply:
    """Run a pass, on the trainer's thread. After one that fails the next step is refused: gradients are missing."""
    try:
        result = trainer.run(model.id, found.examples, found.loss_fn, found.config, forward_only=found.forward_only)
    except BaseException as problem:
        if not found.forward_only:
            model.failure = str(problem)
        raise
    arrays = {"logprobs": result.logprobs}
    return Reply(pass_message(arrays, {"loss:sum": result.loss}), content_type=PROTOBUF)


async def optim_step(
    served: Served,
    asked: Asked,
    *,
    model_id: str,
    adam_params: AdamStep,
    seq_id: int,
    type: Literal["optim_step"] = "optim_step",
) -> Reply:
    """Take a step of AdamW by the gradients so far."""
    tinker = served.tinker.require_on()
    client, model = tinker.clients.find_model(model_id)
    return _queue(tinker, client, model, seq_id, partial(_run_step, tinker.trainer, model, adam_params))


def _run_step(trainer: LoraTrainer, model: TrainedModel, step: AdamStep) -> dict[str, Any]:
    failure, model.failure = model.failure, ""
    if failure:
        trainer.clear(model.id)
        what = f"A pass since the last step has failed ({failure}), so gradients are missing"
        raise RequestError(f"{what}: they were dropped. Send the passes of this step again.")
    return {"metrics": trainer.step(model.id, step)}


async def save_weights(
    served: Served,
    asked: Asked,
    *,
    model_id: str,
    seq_id: int,
    path: str | None = None,
    ttl_seconds: int | None = None,
    overwrite: bool = False,
    user_metadata: dict[str, str] | None = None,
    type: Literal["save_weights"] = "save_weights",
) -> Reply:
    """Save an adapter with the state of its optimizer."""
    tinker = served.tinker.require_on()
    client, model = tinker.clients.find_model(model_id)
    name = f"{seq_id:06d}" if path is None else path
    about = _about(served, model, ttl_seconds, user_metadata)
    save = partial(_save, tinker, model, "weights", name, about, overwrite=overwrite)
    return _queue(tinker, client, model, seq_id, lambda: {"path": save().path, "type": type})


async def save_for_sampler(
    served: Served,
    asked: Asked,
    *,
    model_id: str,
    seq_id: int,
    path: str | None = None,
    sampling_session_seq_id: int | None = None,
    kind: Literal["snapshot", "inflight"] = "snapshot",
    ttl_seconds: int | None = None,
    user_metadata: dict[str, str] | None = None,
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler",
) -> Reply:
    """Save an adapter to sample with: under a name, or as a sampler."""
    tinker = served.tinker.require_on()
    client, model = tinker.clients.find_model(model_id)
    about = _about(served, model, ttl_seconds, user_metadata)
    if path is not None:
        save = partial(_save, tinker, model, "sampler_weights", path, about)
        return _queue(tinker, client, model, seq_id, lambda: {"path": save().path, "type": type})
    if sampling_session_seq_id is None:
        raise RequestError.for_field("sampling_session_seq_id", None, "given without a path")
    sampler = Sampler(f"{client.id}:sample:{sampling_session_seq_id}", client.id)
    sampler.follows = model if kind == "inflight" else None
    if tinker.futures.find(f"{model.id}:{seq_id}") is None:
        tinker.clients.add_sampler(client, sampler)
    work = partial(_save_snapshot, tinker, model, sampler, f"_{seq_id:06d}", about)
    return _queue(tinker, client, model, seq_id, lambda: {"sampling_session_id": work(), "type": type})


def _save_snapshot(tinker: TinkerService, model: TrainedModel, sampler: Sampler, name: str, about: About) -> str:
    """Save the snapshot of a sampler, on the trainer's thread; the oldest gives way if there are too many."""
    saved = _save(tinker, model, "sampler_weights", name, about)
    if sampler.follows is not None:
        model.inflight.append(saved)
        if len(model.inflight) > 2:
            tinker.checkpoints.delete(model.inflight.pop(0).path)
        return sampler.id
    sampler.checkpoint = saved
    model.snapshots.append(sampler)
    if len(model.snapshots) > KEPT_SNAPSHOTS:
        tinker.drop_snapshot(model.snapshots.pop(0))
    return sampler.id


async def load_weights(
    served: Served,
    asked: Asked,
    *,
    path: str,
    optimizer: bool,
    model_id: str | None = None,
    seq_id: int | None = None,
    session_id: str | None = None,
    model_seq_id: int | None = None,
    base_model: str | None = None,
    optimizer_config: OptimizerFields | None = None,
    user_metadata: dict[str, Any] | None = None,
    weights_access_token: str | None = None,
    type: Literal["load_weights"] = "load_weights",
) -> Reply:
    """Load a saved adapter into one that is trained, or begin one with it."""
    tinker = served.tinker.require_on()
    checkpoint = await run_in_thread(tinker.checkpoints.find, path)
    if checkpoint.kind != "weights":
        hint = "Those of sampler_weights have no state of an optimizer, and are sampled with alone."
        raise RequestError.for_field("path", path, "a path of save_state (tinker://MODEL/weights/NAME)", hint)
    about = checkpoint.about

    def load() -> dict[str, Any]:
        tinker.trainer.load(model.id, checkpoint.directory, optimizer=optimizer)
        model.failure = ""
        return {"path": path, "model_id": model.id, "type": type}

    if session_id is None or model_seq_id is None:
        if model_id is None or seq_id is None:
            raise RequestError.for_field("model_id", model_id, "given with seq_id, or session_id with model_seq_id")
        client, model = tinker.clients.find_model(model_id)
        if _layers(model.shape) != _layers(about.shape):
            bound = f"a checkpoint of an adapter of the same layers and rank ({model.shape})"
            raise RequestError.for_field("path", path, bound, f"It is of {about.shape}.")
        return _queue(tinker, client, model, seq_id, load)
    client = tinker.clients.get(session_id)
    model_id = f"{client.id}:train:{model_seq_id}"
    if tinker.futures.find(f"{model_id}:0") is not None:
        return Reply(Ticket(f"{model_id}:0", model_id=model_id))
    served.check_model(base_model)
    served.check_model(about.base_model)
    model = TrainedModel(model_id, about.shape, user_metadata=_texts(user_metadata))
    return _begin_model(tinker, client, model, optimizer_config, load)


def _queue(tinker: TinkerService, client: Client, model: TrainedModel, seq_id: int, work: Any) -> Reply:
    """Queue a model's request behind those before it. Raises `HttpProblem` 400 for a number that is not the next."""
    request_id = f"{model.id}:{seq_id}"
    if tinker.futures.find(request_id) is None:
        if seq_id < model.last_seq_id:
            what = f"seq_id={seq_id} was passed by {model.last_seq_id}"
            raise HttpProblem(400, f"{what}: requests of a model are sent in order.", field="seq_id")
        pending = tinker.queue(client, request_id, work)
        pending.finish = lambda found: found if isinstance(found, Reply) else Reply(found)
        model.last_seq_id = seq_id
    return Reply(Ticket(request_id, model_id=model.id))


def _begin_model(
    tinker: TinkerService,
    client: Client,
    model: TrainedModel,
    optimizer: OptimizerFields | None,
    then: Callable[[], dict[str, Any]],
) -> Reply:
    """Give a client its one adapter. Raises `HttpProblem` 400 if it has one, and `RequestError`."""
    if optimizer is not None and optimizer.type != "adamw":
        raise RequestError.for_field("optimizer_config.type", optimizer.type, "'adamw'")
    tinker.trainer.check_shape(model.shape)
    if client.model is not None:
        what = f"This session trains '{client.model.id}' already, and a session trains one adapter"
        raise HttpProblem(400, f"{what}: make another tinker.ServiceClient() for a second one.")

    def begin() -> dict[str, Any]:
        try:
            tinker.trainer.create(model.id, model.shape)
            return then()
        except BaseException:
            tinker.trainer.remove(model.id)
            client.model = None
            raise

    reply = _queue(tinker, client, model, 0, begin)
    client.model = model
    return reply


def _save(
    tinker: TinkerService, model: TrainedModel, kind: Kind, name: str, about: About, *, overwrite: bool = False
) -> Checkpoint:
    def write(directory: Path) -> None:
        tinker.trainer.save(model.id, directory, optimizer=kind == "weights")

    return tinker.checkpoints.save(model.id, kind, name, about, write, overwrite=overwrite)


def _about(served: Served, model: TrainedModel, ttl_seconds: int | None, user_metadata: dict[str, str] | None) -> About:
    now = time.time()
    return About(
        base_model=served.model,
        shape=model.shape,
        saved_at=now,
        expires_at=None if ttl_seconds is None else now + ttl_seconds,
        user_metadata=user_metadata,
        model_metadata=model.user_metadata,
    )


def _layers(shape: LoraShape) -> tuple[int, bool, bool]:
    return shape.rank, shape.train_mlp, shape.train_attn


def _texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
