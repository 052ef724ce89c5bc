"""Replicas of a provider whose core or actor dies or hangs."""

import os
import signal
import threading

from rollout_engine.fleet.ray.provider import RayProvider
from tests.ray.running import actor_pid, expect_death, expect_gone, generated, groups, provided, scenario, settle


@scenario
def an_actor_that_is_killed_takes_its_core_with_it(config):
    with provided(config) as (provider, replica):
        os.kill(actor_pid(replica), signal.SIGKILL)
        expect_death(replica)
        settle(lambda: not groups("CREATED"), "its room is free again, without anybody's call")
        again = provider.start(0, config)
        assert generated(again.client)


@scenario
def an_actor_that_is_killed_takes_a_stopped_core_with_it(config):
    with provided(config) as (_, replica):
        os.kill(replica.client.pid, signal.SIGSTOP)
        os.kill(actor_pid(replica), signal.SIGKILL)
        expect_death(replica)


@scenario
def a_core_that_is_killed_is_noticed_and_another_takes_its_place(config):
    with provided(config) as (provider, replica):
        os.kill(replica.client.pid, signal.SIGKILL)
        settle(lambda: replica.client.dead_error is not None, "the client sees it")
        replica.end(kill=True)
        expect_gone(replica.client)
        assert generated(provider.start(0, config).client)


@scenario
def a_core_that_hangs_is_noticed_and_ended(config):
    with provided(config, hang_seconds=1.5) as (_, replica):
        os.kill(replica.client.pid, signal.SIGSTOP)
        settle(lambda: replica.client.dead_error is not None, "the hang is noticed")
        replica.end(kill=True)
        expect_gone(replica.client)


@scenario
def an_actor_that_hangs_does_not_keep_its_replica(config):
    with provided(config) as (_, replica):
        os.kill(actor_pid(replica), signal.SIGSTOP)
        assert generated(replica.client), "its core serves on"
        replica.end()
        expect_gone(replica.client)
        settle(lambda: not groups("CREATED"), "its room is free")


@scenario
def a_program_that_waits_to_be_killed(config):
    provider = RayProvider()
    replica = provider.start(0, config)
    print(f"pids {replica.client.pid} {actor_pid(replica)}", flush=True)
    threading.Event().wait()
