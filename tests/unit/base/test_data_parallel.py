"""Options and calls that engines which divide experts refuse, by name and before anything is loaded."""

import pytest

from rollout_engine import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.execution.process_executor import make_executor
from rollout_engine.fleet.placements import fleet_starter
from rollout_engine.fleet.run.groups import GroupProvider


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(device="cuda"), 'device="cuda"'),
        (dict(deterministic=False), "deterministic=False"),
        (dict(tensor_parallel_size=2), "tensor_parallel_size=2"),
        (dict(quantization="int8"), "quantization='int8'"),
        (dict(speculation="auto"), "speculation='auto'"),
        (dict(async_scheduling=True), "async_scheduling=True"),
        (dict(kv_connector="host"), "kv_connector='host'"),
        (dict(load_format="sharded"), "load_format='sharded'"),
    ],
)
def test_options_that_do_not_go_with_divided_experts_are_named(options, named):
    with pytest.raises(ConfigError, match=f"data_parallel_size=2 and {named} are both set"):
        EngineConfig(model="m", data_parallel_size=2, **options)


@pytest.mark.parametrize("size", [0, 65, "2"])
def test_sizes_out_of_bounds_are_refused(size):
    with pytest.raises(ConfigError, match="data_parallel_size"):
        EngineConfig(model="m", data_parallel_size=size)


def test_a_fleet_of_another_number_or_place_is_refused():
    config = EngineConfig(model="m", data_parallel_size=2)
    with pytest.raises(ConfigError, match="data_parallel_size=2 and num_replicas=3 are both set"):
        fleet_starter(num_replicas=3)(config, lambda: None)
    with pytest.raises(ConfigError, match="placement='ray'"):
        GroupProvider.of(config, 1, object())


def test_one_engine_of_a_group_is_not_started_alone():
    with pytest.raises(ConfigError, match="data_parallel_size=2: one engine alone has no others"):
        make_executor(EngineConfig(model="m", data_parallel_size=2))
