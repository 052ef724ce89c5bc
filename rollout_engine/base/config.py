"""Options of an engine: frozen, and checked when they are made."""

import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from rollout_engine.base.class_names import name_of
from rollout_engine.base.errors import ConfigError, refused
from rollout_engine.base.kv_options import check_kv_connector
from rollout_engine.base.outputs import Quantization
from rollout_engine.base.parallel_options import check_data_parallel, check_ranks, check_stages
from rollout_engine.base.peer_options import ENGINE_PEERS
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.base.structs import UserStruct
from rollout_engine.base.toml_files import TomlFile

KV_TILE = 64
_CPU_BLOCK_SIZE, _DEVICE_BLOCK_SIZE = 16, 64
"""Tokens of context that attention reads at a time; `block_size` divides it."""

EXAMPLE_FILE = "`rollout-engine tune` writes"
"""For messages: a TOML file with options."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**50)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
_MAX_TEMPLATE = 1 << 20
"""Characters of a chat template."""
ClassNames = Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)]


def _read_path(value: Any) -> Any:
    if hasattr(value, "state_dict"):
        raise ConfigError(
            f"model={type(value).__name__}(...) is not allowed: must be the directory or hub id of a checkpoint. Save "
            "the model there (save_pretrained), and send its weights later by update_weights(model)."
        )
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _read_template(value: Any) -> Any:
    """Read a chat template as its text, from the text or the path of a file. Raises `ConfigError`."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or ("{" in path and path is value):
        return path
    if not os.path.isfile(path):
        raise ConfigError(
            refused("chat_template", path, "a Jinja template or the path of a file with one", "No such file.")
        )
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_TEMPLATE + 1)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"chat_template: {path!r} cannot be read: {problem}.") from None
    if "{" not in text:
        raise ConfigError(refused("chat_template", path, "a file with a Jinja template", "It has no {{ or {%."))
    return text


def read_dtype(value: Any) -> Any:
    """Read a dtype as its full name, from a name, a short name, or a dtype of torch or numpy."""
    if value is None or isinstance(value, bool | int | float):
        return value
    name = value if isinstance(value, str) else getattr(value, "name", getattr(value, "__name__", str(value)))
    name = str(name).removeprefix("torch.")
    return _DTYPES.get(name, name)


def _read_device(value: Any) -> Any:
    """Read a device as its name, also from `torch.device`. The first of a kind needs no number."""
    name = value if isinstance(value, str) else str(value) if type(value).__name__ == "device" else value
    return name.removesuffix(":0") if isinstance(name, str) else name


def _read_speculation(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    try:
        return SpeculationConfig(**{str(name): each for name, each in value.items()})
    except ConfigError as problem:
        raise ConfigError(f"speculation: {problem}") from None


def _read_classes(field: str) -> Callable[[Any], Any]:
    """Make the reader of `field`, which turns classes or their names, one or several, into names."""

    def read(value: Any) -> Any:
        listed = [value] if isinstance(value, str | type) else value
        if not isinstance(listed, list | tuple):
            return value
        return tuple(name_of(each, field) if isinstance(each, type) else each for each in listed)

    return read


class EngineConfig(UserStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[metaclass]
    """Options of one engine. Unknown names, wrong types and broken bounds raise `ConfigError`.

    >>> EngineConfig(model="path/or/hub-id", max_num_seqs=64)
    """

    error_class = ConfigError
    peers = ENGINE_PEERS
    readings = {
        "model": _read_path,
        "tokenizer": _read_path,
        "chat_template": _read_template,
        "profiler_dir": _read_path,
        "step_trace": _read_path,
        "dtype": read_dtype,
        "device": _read_device,
        "speculation": _read_speculation,
        "logits_processors": _read_classes("logits_processors"),
        "worker_extensions": _read_classes("worker_extensions"),
    }

    model: Text
    """Directory of a checkpoint, a GGUF file, or a hub id."""
    tokenizer: Text | None = None
    """Directory or hub id of the tokenizer; None: the model's."""
    chat_template: Annotated[str, msgspec.Meta(max_length=_MAX_TEMPLATE)] | None = None
    """Chat template in place of the tokenizer's: a Jinja template, or the path of a file with one, which is read when
    the options are made. Calls and requests may still name another."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and activations. "auto": the checkpoint's; float32 on a CPU without native bfloat16. Also
    torch's own (`torch.bfloat16`) and the short names "bf16", "fp16", "half", "fp32", "float"."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. "auto": on the CPU. "cuda": on the first CUDA device, by the Triton kernels."""
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.9
    """Share of a device's memory for weights, the largest step, CUDA graphs, the shadow of a weight update
    (`reserve_for_updates`) and the KV pool, which takes what the others leave."""
    reserve_for_updates: bool = True
    """On a device, leave room for a second copy of the weights, into which updates are received while steps go on.
    False: a larger KV pool, for weights that stay or change in place (`staging="inplace"`), which stops steps."""
    cuda_graphs: bool = True
    """On a device, replay steps in which every sequence decodes as captured graphs."""
    compile: bool = False
    """Only False: layers run by our kernels, and `torch.compile` would round otherwise than a trainer
    (decisions/0019)."""
    max_model_len: Positive | None = None
    """Most tokens of one sequence, prompt included. None: the checkpoint's, capped so that one fits the KV pool."""
    block_size: Positive | Literal["auto"] = "auto"
    """Tokens per KV block; divides 64, the KV tile. "auto": 16 on a CPU; 64 on a device, whose attention reads whole
    tiles faster. No result depends on it, but for last bits on a device without `deterministic`, where the batch moves
    them too. Prompts share the KV of whole blocks of what they begin with: where many begin alike for fewer than 64
    tokens and then differ, give 16 (docs/tuning.md)."""
    kv_cache_bytes: Positive | None = None
    """Size of the KV pool. None: on a CPU, the smaller of 4 GiB and a quarter of the available memory;
    on a device, what `gpu_memory_utilization` leaves. A given size leaves room for updates to you."""
    num_kv_blocks: Positive | None = None
    """Size of the KV pool in blocks; excludes `kv_cache_bytes`."""
    state_cache_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)] | None = None
    """For models whose layers keep a state of each sequence: most bytes of states that are kept to be found again, as
    KV blocks are, at some positions of prompts and at ends of sequences, on all ranks together. None: half of the KV
    pool's bytes, or two states for each of `max_num_seqs` if that is less. 0: only those that fit if no running
    sequence needs the memory. States of running sequences are not counted, and always have room."""
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 256
    """Most sequences in one step."""
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**24)] = 8192
    """Most tokens computed in one step; longer prompts are computed in chunks. If tokens of a picture see one another
    in both directions (Gemma 3), a chunk that begins with a picture goes beyond this to its end."""
    async_scheduling: bool | Literal["auto"] = "auto"
    """Prepare the next step while one runs: same tokens, same log-probs. "auto": on for a device, unless tokens are
    drafted there (`speculation`); off on a CPU, which computes on the cores that would prepare (decisions/0004)."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks of equal prefixes computed under the same policy version."""
    speculation: Literal["off", "auto"] | SpeculationConfig = "off"
    """Draft tokens from earlier rollouts and from the sample itself, and compute several in one step: same tokens, same
    log-probs, to the bit. "auto": where measurements at load say that it pays, by the defaults of `SpeculationConfig`.
    With `deterministic`, which a device has to be asked for, and without `async_scheduling`."""
    max_loras: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    """Most LoRA adapters held at a time (`add_lora`). They take no memory and no time before they are added."""
    max_lora_rank: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    """Highest rank of an adapter."""
    max_prompt_pictures: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 8
    """Most pictures of one prompt. 0: a model's vision tower is not loaded, and pictures are refused."""
    max_picture_pixels: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 64 << 20
    """Most pixels of one picture as it is given, read from its header before it is decoded. The checkpoint's image
    processor makes large pictures smaller."""
    mm_cache_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)] = 1 << 30
    """Most bytes of pictures that an engine in another process keeps of each client, so that a picture that several
    requests share is sent once (`reset_mm_cache`)."""
    encoder_cache_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)] = 1 << 30
    """Most bytes of the vision tower's outputs that each rank keeps, so that a picture that several requests share is
    encoded once for each version of the tower's weights (`reset_encoder_cache`)."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """Root of the sequence seeds of requests that name none."""
    deterministic: bool | Literal["auto"] = "auto"
    """Log-probs independent of batch, chunking and threads, equal to `exact` on the trainer. "auto": True on a CPU,
    False on a device, where it costs speed."""
    fp32_head: bool = False
    """On a CPU, logits of a bfloat16 model in float32: the head's products are added in float32 and not rounded. Have
    the trainer do the same by `exact.enable(model, fp32_head=True)`. A float32 model's logits are float32 anyway."""
    quantization: Quantization | None = None
    """"int8": on a CPU, layers multiply by weights rounded to 8 bits, a quarter of the bytes that a decode step reads
    in float32. Log-probs are then no trainer's, and completions say so (`CompletionOutput.quantization`); they still
    do not depend on the batch. Embeddings, head and norms are not rounded. See docs/exactness.md."""
    num_threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    """Threads of the model's forward, of each rank where there are several. None: torch's own setting, by default one
    per physical core, divided among the ranks."""
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Processes that the model is cut over: each holds a part of every weight and of the KV pool, on a device of its
    own with `device="cuda"`. Tokens and log-probs are those of one, to the bit; on devices with `deterministic=True`,
    and without it they are cut to exchange less. See docs/ranks.md."""
    executor: Literal["auto", "inline", "process", "ray"] = "auto"
    """Where the ranks of `tensor_parallel_size` run. "inline": the one rank in the engine's process. "process": the
    others in processes of this machine. "ray": the others on the nodes of a Ray cluster, with the extra `ray`, found as
    `ray.init()` finds it. "auto": "inline" for one, "process" for more."""
    load_format: Literal["auto", "dummy", "sharded"] = "auto"
    """"auto": `model` is a checkpoint. "sharded": it is a directory of `save_sharded_state`, from which each rank reads
    its own file; the same `tensor_parallel_size`, dtype and, on devices, `deterministic` are needed (docs/ranks.md).
    "dummy": random weights from the configuration alone, for tests and measurements."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, outputs have no text."""
    admission: Literal["queue", "reject"] = "queue"
    """Let requests that come while the engine is paused or asleep wait, or raise `RetryableError`."""
    on_long: Literal["refuse", "clamp"] = "refuse"
    """How to treat a request whose `max_tokens` does not fit behind its prompt within `max_model_len`. "refuse":
    `RequestError`, and in a batch the whole call is refused, naming the prompt. "clamp": `max_tokens` is shortened to
    the room left, a log line counts how many, and a completion that fills it ends with finish_reason "length". A prompt
    that leaves no room for one token is refused either way: shorten it, or see `truncate_prompt_tokens`."""
    logits_processors: ClassNames = ()
    """Classes that edit logits, in this order, or their names "package.module:Class"; imported where the model runs.
    See `model.logits_processors`."""
    worker_extensions: ClassNames = ()
    """Classes, or their names "package.module:Class", whose methods `collective_rpc` calls, beside the stock ones;
    imported where the model runs. See `worker_ext.base`."""
    step_deadline: Annotated[float, msgspec.Meta(gt=0)] | None = 1800.0
    """Seconds after which a step, a call between two steps, or the commit of a weight update counts as stuck; None:
    never. A commit has a second more for each 64 MiB of weights. A logits processor or a worker extension that loops is
    then interrupted and fails its request or call (`StepDeadlineError`). What cannot be
    interrupted ends a core in a process of its own, and `EngineDeadError` says what it was; in process, the log and
    `check_health` do. The default lets an 8B model prefill 8,192 tokens on two CPU cores (ten minutes) three times."""
    stream_interval: Positive = 1
    """Tokens of a sample between two of its streamed outputs: fewer outputs cost less. The first token and the last
    come at once whatever it is."""
    log_stats: bool = True
    """Log a line of statistics every `log_interval` seconds while there is work, and when it is done."""
    log_interval: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 10.0
    """Seconds between two calls of the stat loggers."""
    otlp_traces_endpoint: Text | None = None
    """Where spans of requests, pauses and weight updates go: the URL of an OTLP/HTTP collector, for example
    "http://localhost:4318/v1/traces". Needs the extra `otel`. See `telemetry.spans`."""
    profiler_dir: Text | None = None
    """Directory of the traces that `start_profile` records, where the model runs; made when it is missing. None: each
    call of `start_profile` names one."""

    step_trace: Text | None = None
    """Directory for a trace of every step, where the model runs: which sequences it computed and drew for, under which
    version. `rollout-engine replay --explain` reads it. None: nothing is written, and nothing is slower."""
    step_trace_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=2**50)] = 64 << 20
    """Most bytes of an engine's trace; the oldest steps are forgotten."""
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Engines, each with requests of its own, that divide the experts of a mixture and have the bits of one engine;
    processes of one machine, on CPUs. A model without experts is whole in each. See docs/fleet.md."""
    kv_connector: Text | None = None
    """A second, larger prefix cache outside of the KV pool: "host" (memory of this process), "shm" (memory of this
    machine, shared by its engines), "disk:DIR", or a class "package.module:Class" of your own, with an argument as
    "package.module:Class:ARGUMENT". KV is found there by its tokens and the values of the weights, whichever engine
    computed it: same tokens, same log-probs. None: there is none. See docs/kv.md."""
    kv_connector_bytes: Positive | None = None
    """Most bytes that `kv_connector` holds. None: 4 GiB, or a quarter of the free memory if that is less."""
    pipeline_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    """Stages that the model's layers are divided among, on a CPU: each is a process, or `tensor_parallel_size` of them,
    and as many steps are in flight. Tokens and log-probs are those of one process, to the bit. See docs/ranks.md."""

    @property
    def num_ranks(self) -> int:
        """Processes that the model is cut over."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tokens_per_block(self) -> int:
        """`block_size` with "auto" resolved."""
        if self.block_size != "auto":
            return self.block_size
        return _DEVICE_BLOCK_SIZE if self.device == "cuda" else _CPU_BLOCK_SIZE

    @property
    def schedules_ahead(self) -> bool:
        """Whether steps are scheduled ahead: `async_scheduling` with "auto" resolved."""
        if self.async_scheduling == "auto":
            return self.device == "cuda" and self.speculates is None
        return self.async_scheduling

    @property
    def speculates(self) -> SpeculationConfig | None:
        """`speculation` with "auto" resolved; None: no token is drafted."""
        if isinstance(self.speculation, SpeculationConfig):
            return self.speculation
        return SpeculationConfig() if self.speculation == "auto" else None

    def check(self) -> None:
        if self.speculates is not None:
            self._check_speculation()
        if KV_TILE % self.tokens_per_block:
            bound = f"a divisor of {KV_TILE} (1, 2, 4, 8, 16, 32 or 64)"
            raise ConfigError(refused("block_size", self.block_size, bound))
        if self.kv_cache_bytes is not None and self.num_kv_blocks is not None:
            raise ConfigError("kv_cache_bytes and num_kv_blocks both set: give one of them.")
        if self.state_cache_bytes and not self.enable_prefix_caching:
            raise ConfigError(
                f"state_cache_bytes={self.state_cache_bytes} and enable_prefix_caching=False are both set: no state is "
                "kept to be found again without the prefix cache. Give one of them."
            )
        if self.fp32_head and (self.device == "cuda" or self.deterministic is False):
            other = 'device="cuda"' if self.device == "cuda" else "deterministic=False"
            raise ConfigError(
                f"fp32_head=True and {other} are both set: a float32 head is computed by the CPU's row-independent "
                "products alone. Give one of them."
            )
        if self.quantization is not None:
            self._check_quantization()
        if self.compile:
            raise ConfigError(
                "compile=True is not possible: steps run by kernels that are compiled already, and torch.compile "
                "would round otherwise than the trainer. Leave it out."
            )
        if self.otlp_traces_endpoint is not None and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            bound = "the URL of an OTLP/HTTP collector, http://... or https://..."
            raise ConfigError(refused("otlp_traces_endpoint", self.otlp_traces_endpoint, bound))
        check_ranks(self)
        check_data_parallel(self)
        check_kv_connector(self)
        check_stages(self)
        if self.chat_template is not None and self.skip_tokenizer_init:
            raise ConfigError(
                "chat_template and skip_tokenizer_init=True are both set: without a tokenizer no conversation is "
                "rendered. Give one of them."
            )
        if not self.model:
            raise ConfigError(refused("model", self.model, "a checkpoint directory or a hub id"))

    def _check_quantization(self) -> None:
        found = {
            'device="cuda"': (self.device == "cuda", "a device has no kernel for rounded weights"),
            "deterministic=False": (self.deterministic is False, "rounded weights run by row-independent products"),
            f"tensor_parallel_size={self.tensor_parallel_size}": (
                self.tensor_parallel_size > 1,
                "ranks have the bits of one engine that is not rounded",
            ),
        }
        for other, (is_set, reason) in found.items():
            if is_set:
                mine = f"quantization={self.quantization!r}"
                raise ConfigError(f"{mine} and {other} are both set: {reason}. Give one of them.")

    def _check_speculation(self) -> None:
        mine, is_device = f"speculation={self.speculation!r}", self.device == "cuda"
        if is_device and self.deterministic == "auto":
            raise ConfigError(
                f'{mine} on device="cuda" needs deterministic=True: drafted tokens are computed several in one step, '
                "and without it rows of other steps round otherwise. Give it, or set speculation='off'."
            )
        found = {"deterministic=False": self.deterministic is False}
        found["async_scheduling=True"] = self.async_scheduling is True
        for other, is_set in found.items():
            if is_set:
                raise ConfigError(
                    f"{mine} and {other} are both set: drafted tokens are computed several in one step, by "
                    "row-independent products, and no step is scheduled before it is known which were right. Leave "
                    f"{other} out, or set speculation='off'."
                )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineConfig":
        """Make a config, checked as by calling the class."""
        return cls(**kwargs)

    @classmethod
    def load(cls, path: str | os.PathLike[str], **kwargs: Any) -> "EngineConfig":
        """Make a config from a TOML file, such as `rollout-engine tune` writes; `kwargs` replace its values.

        A key is an option; those of `SpeculationConfig` are in a table [speculation]. A value is one that the option
        takes, and an option that is None is left out. Raises `ConfigError`, which names the line.
        """
        file = TomlFile.read(path, EXAMPLE_FILE)
        try:
            return cls(**(file.content | kwargs))
        except ConfigError as problem:
            raise file.add_location(problem, kwargs) from None
