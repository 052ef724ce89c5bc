"""The simulated engine decides as the real core does, on the same clock."""

import pytest

from rollout_engine.capacity.costs import StepCosts
from rollout_engine.capacity.fleet_file import read_cases
from rollout_engine.capacity.simulation import Simulation

from .real_core import serve

ALONE = (
    "fleet.num_replicas=1",
    "training.train_seconds=0",
    "weights.gigabytes=0",
    "weights.commit_seconds=0",
    "workload.num_batches=1",
)
SMALL = (
    "workload.prompts_per_batch=12",
    "workload.samples_per_prompt=4",
    "workload.prompt_tokens.median=80",
    "workload.prompt_tokens.p95=200",
    "workload.prompt_tokens.most=300",
    "workload.output_tokens.median=40",
    "workload.output_tokens.p95=120",
    "workload.output_tokens.most=200",
    "engine.max_num_seqs=16",
)
CASES = {
    "at once": (),
    "chunked beside decode": ("engine.max_prefill_beside_decode=64",),
    "chunked": ("engine.max_num_batched_tokens=100",),
    "arriving": ("workload.requests_per_second=4",),
    "shared prefixes": (
        "workload.requests_per_second=4",
        "workload.samples_per_request=1",
        "workload.shared_prefix_tokens=40",
        "workload.prompt_tokens.least=60",
    ),
    "no caching": ("engine.enable_prefix_caching=false", "workload.samples_per_request=2"),
}


def simulated_and_real(*options):
    file = read_cases(None, [*ALONE, *SMALL, *options])[0].file
    simulation = Simulation(file)
    outcome = simulation.run()
    workload = simulation.workload
    arrivals = workload.arrivals(file.seed) if file.workload.arrives else [(0.0, workload.batches[0])]
    ended, executor, stats = serve(file, workload, arrivals)
    simulation.fleet.brain.check_integrity()
    simulation.fleet.replicas[0].engine.check_integrity()
    return outcome, [job.ended_at for job in workload.jobs], [ended[i] for i in range(len(ended))], stats


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_requests_end_when_the_real_core_ends_them(options):
    outcome, simulated, real, stats = simulated_and_real(*options)
    assert simulated == pytest.approx(real, rel=1e-9)
    assert outcome.prefix_hit_share == pytest.approx(stats.num_cached_tokens / max(stats.num_looked_up_tokens, 1))
    assert not outcome.num_preempted


def test_where_kv_runs_out_it_is_close():
    outcome, simulated, real, stats = simulated_and_real("engine.num_kv_blocks=80")
    assert outcome.num_preempted > 0 < stats.num_preemptions
    assert max(simulated) == pytest.approx(max(real), rel=0.05)
    assert outcome.num_tokens == stats.num_tokens_sampled


def test_one_sequence_takes_the_sum_of_its_steps():
    options = (
        "workload.prompts_per_batch=1",
        "workload.samples_per_prompt=1",
        "workload.prompt_tokens.values=[100]",
        "workload.output_tokens.values=[50]",
    )
    case = read_cases(None, [*ALONE, *options])[0]
    costs = case.file.costs.costs
    prefill = StepCosts(costs.step_seconds, 0, 100 * costs.prefill_token_seconds, 100 * costs.context_token_seconds)
    contexts = sum(range(101, 150))
    decode = 49 * (costs.step_seconds + costs.row_seconds) + contexts * costs.context_token_seconds
    assert Simulation(case.file).run().seconds == pytest.approx(sum(prefill) + decode)
