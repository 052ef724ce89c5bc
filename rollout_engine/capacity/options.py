"""The tables of a fleet file: the fleet, its work, and all costs. Units are in the names."""

from typing import Annotated, Any, Literal

import msgspec

from rollout_engine.base.errors import ConfigError, refused
from rollout_engine.base.structs import UserStruct
from rollout_engine.capacity.costs import StepCosts
from rollout_engine.fleet.plan.balancer import Balancer

Count = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Counts0 = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Table(UserStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[metaclass]
    """Base of the tables."""


class FleetTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas, their places, and the choice of one for a request."""

    readings = {"balancer": lambda value: [value] if isinstance(value, str) else value}

    num_replicas: Count = 8
    """Engines at the start; a failed one returns."""
    replicas_per_node: Count = 8
    """Replicas that share a node, and there one copy of published weights."""
    balancer: tuple[str, ...] = ("prefix-aware", "requests")
    """Strategies in fallback order, those of `Balancer`."""
    prefix_length: Count = 8
    """First tokens of a prompt that "prefix-aware" compares."""
    overload_threshold: Annotated[float, msgspec.Meta(ge=1)] = 1.5
    """Times the mean load from which a replica gets no request because of its prefix."""
    slow_share: Share = 0.0
    """Share of the replicas whose steps take `slow_factor` times as long."""
    slow_factor: Rate = 1.5
    """Times as long as those of others that steps of slow replicas take."""

    @property
    def num_nodes(self) -> int:
        """Nodes that hold a replica."""
        return -(-self.num_replicas // self.replicas_per_node)

    def make_balancer(self) -> Balancer:
        """The balancer of a fleet. Raises `ConfigError` for an unknown strategy."""
        strategies: Any = self.balancer
        return Balancer(strategies, prefix_length=self.prefix_length, overload_threshold=self.overload_threshold)

    def check(self) -> None:
        self.make_balancer()


class EngineTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of every engine, by the names of `EngineConfig`."""

    max_num_seqs: Count = 256
    """Most sequences of a step."""
    max_num_batched_tokens: Count = 8192
    """Most tokens of a step, at least `max_num_seqs`."""
    max_prefill_beside_decode: Count = 1 << 30
    """Most prompt tokens of a step in which other sequences decode: 512 on a CPU; a device has no such bound."""
    num_kv_blocks: Count = 24_000
    """Blocks of the KV pool."""
    block_size: Count = 16
    """Tokens of a block: by default 16 on a CPU, 64 on a device."""
    enable_prefix_caching: bool = True
    """Whether prompts that begin alike share the KV of their common part."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_kv_blocks * self.block_size

    def check(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            bound = f"at least max_num_seqs={self.max_num_seqs}"
            raise ConfigError(refused("max_num_batched_tokens", self.max_num_batched_tokens, bound))


class CostsTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step, added up; or their source. The defaults are reckoned, not measured: an 8B model in
    bfloat16 that reads its weights at 3 TB/s."""

    step_seconds: Amount = 6e-3
    """Of every step, whatever is in it."""
    row_seconds: Amount = 2e-5
    """More for each sequence that decodes."""
    prefill_token_seconds: Amount = 4e-5
    """More for each token of a prompt that is computed."""
    context_token_seconds: Amount = 4e-8
    """More for each token of KV that a decoding sequence reads."""
    file: str = ""
    """File with a table [costs] that was measured before; in place of the numbers."""
    measure: str = ""
    """Checkpoint whose steps are measured on this machine first; in place of the numbers."""

    @property
    def costs(self) -> StepCosts:
        """The numbers."""
        return StepCosts(self.step_seconds, self.row_seconds, self.prefill_token_seconds, self.context_token_seconds)

    def check(self) -> None:
        if self.file and self.measure:
            raise ConfigError(f"file={self.file!r} and measure={self.measure!r} are both set: give one of them.")
        if not self.step_seconds + self.row_seconds > 0:
            raise ConfigError(refused("step_seconds", self.step_seconds, "above 0, or row_seconds is: steps take time"))


class Lengths(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A distribution of lengths in tokens: log-normal between `least` and `most`, or drawn from `values`."""

    median: Rate = 256.0
    """Half of the lengths are shorter."""
    p95: Rate = 512.0
    """19 of 20 lengths are shorter. The median again for one length alone."""
    least: Count = 1
    """Shortest length; shorter draws become it."""
    most: Count = 4096
    """Longest length; longer draws become it."""
    values: tuple[Count, ...] = ()
    """Lengths to draw from, such as those of real rollouts, in place of median and p95."""

    def check(self) -> None:
        if self.p95 < self.median:
            raise ConfigError(refused("p95", self.p95, f"at least median={self.median:g}"))
        if self.least > self.most:
            raise ConfigError(refused("least", self.least, f"at most most={self.most}"))
        if self.values and max(self.values) > self.most:
            raise ConfigError(refused("values", max(self.values), f"at most most={self.most}"))


class WorkloadTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rollout batches, one after another; or requests that arrive independently."""

    num_batches: Count = 4
    """Rollout batches, one after another."""
    prompts_per_batch: Count = 256
    """Prompts of each batch."""
    samples_per_prompt: Count = 8
    """Samples of each prompt: the size of a group."""
    samples_per_request: Counts0 = 0
    """Samples that one request asks for. 0: all of a prompt's, which computes the prompt once."""
    requests_per_second: Amount = 0.0
    """Above 0, prompts arrive as a Poisson process in place of batches, `num_batches` x `prompts_per_batch` in all."""
    prompt_tokens: Lengths = msgspec.field(default_factory=lambda: Lengths(median=256, p95=512, most=1024))
    """Lengths of prompts."""
    shared_prefix_tokens: Counts0 = 0
    """First tokens of every prompt that are the same for all, such as a system prompt; part of its length."""
    output_tokens: Lengths = msgspec.field(default_factory=lambda: Lengths(median=800, p95=4000, most=8192))
    """Lengths of samples."""
    sample_correlation: Share = 0.5
    """How much the lengths of a prompt's samples are alike: 0 not at all, 1 the same."""

    @property
    def samples_together(self) -> int:
        """Samples of one request."""
        return self.samples_per_request or self.samples_per_prompt

    @property
    def arrives(self) -> bool:
        """Whether prompts arrive independently."""
        return self.requests_per_second > 0

    def check(self) -> None:
        if self.samples_per_prompt % self.samples_together:
            bound = f"a divisor of samples_per_prompt={self.samples_per_prompt}, or 0"
            raise ConfigError(refused("samples_per_request", self.samples_per_request, bound))


class TrainingTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer: it trains on one batch after another and publishes new weights after each."""

    train_seconds: Amount = 30.0
    """Of training on one batch."""
    max_staleness: Counts0 = 0
    """Versions by which the weights that begin a batch may lag behind those that train on it. 0: rollouts and training
    take turns; 1: the next batch is made while this one trains."""
    mode: Literal["keep", "wait"] = "keep"
    """Requests in flight at an update continue under the new weights, or end first."""
    kv: Literal["keep", "recompute"] = "keep"
    """Requests that continue keep the KV of the old weights, or compute it again under the new ones."""


class WeightsTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New weights: published once, sent from node to node, staged by each replica, committed between two steps."""

    gigabytes: Amount = 16.0
    """Size of all weights."""
    publish_gigabytes_per_second: Rate = 8.0
    """How fast the trainer packs and writes them."""
    fan_out: Literal["chain", "tree", "star"] = "tree"
    """Who sends to whom between nodes: each to the next, each to `tree_degree` others, or the trainer's to all."""
    tree_degree: Count = 2
    """Nodes that each sends to with fan_out="tree"."""
    publications: Literal["node", "replica"] = "node"
    """Whether a node's replicas read one copy, or each gets its own over the network."""
    network_gigabytes_per_second: Rate = 12.5
    """Out of one node, shared by all that it sends to."""
    chunk_megabytes: Rate = 64.0
    """The part that a node has before it begins to pass it on."""
    latency_seconds: Amount = 0.001
    """Delay of a chunk from node to node, in addition to its transfer."""
    stage_gigabytes_per_second: Rate = 10.0
    """How fast one replica reads them."""
    node_read_gigabytes_per_second: Rate = 40.0
    """How fast all replicas of a node read together."""
    commit_seconds: Amount = 0.05
    """Stall of a replica at its commit."""


class FailuresTable(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Failures of replicas, and their costs."""

    mtbf_hours: Amount = 0.0
    """Mean time of service of one replica until it fails; times are exponential. 0: none ever fails."""
    detection_seconds: Amount = 0.25
    """From a failure until the fleet notices it."""
    restart_seconds: Amount = 120.0
    """From the restart's begin until the engine is loaded; it then stages the newest weights."""
    requests: Literal["continue", "restart"] = "continue"
    """Requests of a lost replica continue behind the tokens that they have, as `FleetClient`'s do, or begin again."""


class FleetFile(msgspec.Struct, frozen=True, kw_only=True):
    """All tables of one case."""

    fleet: FleetTable
    engine: EngineTable
    costs: CostsTable
    workload: WorkloadTable
    training: TrainingTable
    weights: WeightsTable
    failures: FailuresTable
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of lengths, arrivals and failures: the same file and seed give the same figures."""

    def check(self) -> None:
        """Raise `ConfigError` if tables do not fit each other."""
        longest = self.workload.prompt_tokens.most + self.workload.output_tokens.most
        if longest > self.engine.num_kv_tokens:
            what = (
                f"[workload] has sequences of up to {longest} tokens, and [engine] KV for {self.engine.num_kv_tokens}"
            )
            raise ConfigError(f"{what} (num_kv_blocks x block_size): raise num_kv_blocks, or lower `most` of a length.")
        if self.workload.shared_prefix_tokens > self.workload.prompt_tokens.least:
            bound = f"at most prompt_tokens.least={self.workload.prompt_tokens.least}, the shortest prompt"
            raise ConfigError(refused("workload.shared_prefix_tokens", self.workload.shared_prefix_tokens, bound))
