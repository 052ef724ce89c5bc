"""A simulated fleet: what it must keep whatever the file says."""

import subprocess
import sys

import msgspec
import pytest

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.capacity.fan_out import FanOut
from rollout_engine.capacity.fleet_file import read_cases
from rollout_engine.capacity.options import FleetTable, WeightsTable
from rollout_engine.capacity.plot import tokens_per_second
from rollout_engine.capacity.simulation import Simulation

SMALL = (
    "fleet.num_replicas=4",
    "workload.num_batches=3",
    "workload.prompts_per_batch=16",
    "workload.samples_per_prompt=4",
    "workload.output_tokens.median=100",
    "workload.output_tokens.p95=400",
    "training.train_seconds=5",
    "engine.max_num_seqs=16",
)
FAILING = (
    "failures.mtbf_hours=0.004",
    "failures.restart_seconds=3",
    "training.train_seconds=0",
    "workload.output_tokens.median=600",
    "workload.output_tokens.p95=1000",
)


def simulate(*options):
    simulation = Simulation(read_cases(None, [*SMALL, *options])[0].file)
    outcome = simulation.run()
    simulation.fleet.brain.check_integrity()
    simulation.fleet.brain.balancer.check_integrity()
    for replica in simulation.fleet.replicas.values():
        replica.engine.check_integrity()
    return simulation, outcome


@pytest.mark.parametrize("mode", ["keep", "wait"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_every_token_is_sampled_once(mode, max_staleness):
    simulation, outcome = simulate(f"training.mode={mode}", f"training.max_staleness={max_staleness}")
    assert simulation.fleet.engine_counts.num_sampled == outcome.num_tokens
    assert not len(simulation.fleet.brain.ledger)
    assert outcome.staleness.max <= max_staleness
    assert outcome.update_seconds.p50 >= simulation.fan_out.staged_seconds(0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("requests", ["continue", "restart"])
def test_failures_cost_the_tokens_that_are_thrown_away_and_no_others(requests, seed):
    simulation, outcome = simulate(
        *FAILING, f"failures.requests={requests}", f"seed={seed}", "training.max_staleness=1"
    )
    assert outcome.num_failures > 2 and outcome.num_moved
    assert simulation.fleet.engine_counts.num_sampled == outcome.num_tokens + outcome.num_lost_tokens
    assert bool(outcome.num_lost_tokens) == (requests == "restart")
    assert all(job.num_left == 0 for job in simulation.workload.jobs)


def test_a_fleet_whose_replicas_fail_at_once_is_dead():
    with pytest.raises(EngineDeadError, match="no replica of the fleet is left"):
        simulate("failures.mtbf_hours=1e-5")


def test_more_replicas_are_faster():
    options = ("training.train_seconds=0", "weights.gigabytes=0", "fleet.balancer=requests", "engine.max_num_seqs=8")
    outcomes = [simulate(*options, f"fleet.num_replicas={count}")[1] for count in (1, 2, 4, 8)]
    rates = [outcome.tokens_per_second for outcome in outcomes]
    assert rates == sorted(rates) and rates[-1] > 1.5 * rates[0]


def test_rollouts_beside_training_are_faster_and_stale():
    (_, turns), (_, beside) = (simulate(f"training.max_staleness={count}") for count in (0, 1))
    assert beside.tokens_per_second > turns.tokens_per_second
    assert turns.staleness.max == 0 < beside.staleness.mean


def test_the_same_seed_gives_the_same_figures():
    first, again, other = (
        msgspec.structs.replace(simulate(*FAILING, f"seed={seed}")[1], wall_seconds=0) for seed in (5, 5, 6)
    )
    assert first == again != other


def test_the_prefix_aware_balancer_finds_more_prefixes():
    options = ("workload.samples_per_request=1", "workload.requests_per_second=20", "engine.max_num_seqs=4")
    hits = {
        name: simulate(*options, f"fleet.balancer={name}")[1].prefix_hit_share
        for name in ("prefix-aware", "round-robin")
    }
    assert hits["prefix-aware"] > hits["round-robin"] + 0.1


def test_a_slow_replica_makes_the_tail():
    even, slow = (simulate("fleet.slow_factor=4", f"fleet.slow_share={share}")[1] for share in (0, 0.25))
    assert slow.batch_seconds.p50 > 1.5 * even.batch_seconds.p50


def test_weights_go_from_node_to_node():
    weights = dict(
        gigabytes=10, network_gigabytes_per_second=10, chunk_megabytes=100, latency_seconds=0.5, tree_degree=2
    )
    fleet = FleetTable(num_replicas=64, replicas_per_node=8)
    arrivals = {
        kind: [FanOut(WeightsTable(**weights, fan_out=kind), fleet).arrival_seconds(node) for node in range(8)]
        for kind in ("chain", "tree", "star")
    }
    assert arrivals["chain"] == pytest.approx([0, *(1 + 0.01 * hops + 0.5 * (hops + 1) for hops in range(7))])
    assert arrivals["star"] == pytest.approx([0, *[7.5] * 7])
    assert arrivals["tree"] == pytest.approx([0, 2.5, 2.5, *[3.02] * 4, 3.54])
    per_replica = FanOut(WeightsTable(**weights, publications="replica"), fleet)
    assert per_replica.network_gigabytes == 640
    assert per_replica.arrival_seconds(1) > 8 * 2


def test_the_timeline_has_every_token():
    simulation, outcome = simulate()
    _, rates = tokens_per_second(simulation.fleet.timeline)
    seconds = max(simulation.fleet.timeline.ends)
    assert rates.sum() * seconds / len(rates) == pytest.approx(outcome.num_tokens)


def test_it_needs_no_torch():
    code = "import sys, rollout_engine.capacity.simulation; print(sorted({'torch', 'zmq', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
