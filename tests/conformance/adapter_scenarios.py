"""Scenarios of the verbs for LoRA adapters."""

import pytest

from rollout_engine import LoRARequest
from rollout_engine.base.errors import LifecycleError, RequestError, StaleVersionError
from rollout_engine.testing import random_adapter, tiny_model
from tests.conformance.running import SHORT, in_flight, last_of, told
from tests.conformance.scenario_table import call, scenario

ADAPTER = random_adapter(tiny_model(), "a")


@scenario(lora_request=ADAPTER)
def add_lora(engine):
    with pytest.raises(RequestError, match="rank=65"):
        engine.add_lora(random_adapter(tiny_model(), "b", rank=65))
    first = engine.add_lora(ADAPTER)
    found = told(last_of(engine, "hello", SHORT, lora_request="a"))
    assert engine.add_lora(ADAPTER) == first
    assert engine.remove_lora("a")
    return first.digest, first.num_bytes, found


@scenario(lora_request="a")
def remove_lora(engine):
    engine.add_lora(ADAPTER)
    with in_flight(engine, lora_request="a"), pytest.raises(LifecycleError, match="1 unfinished requests use 'a'"):
        engine.remove_lora("a")
    return engine.remove_lora("a"), engine.remove_lora(ADAPTER)


@scenario()
def list_loras(engine):
    engine.add_lora(ADAPTER)
    found = [(each.name, each.rank, each.revision) for each in engine.list_loras()]
    engine.remove_lora("a")
    return found, engine.list_loras()


@scenario(lora_request=ADAPTER)
def ensure_lora(engine):
    first = call(engine, "ensure_lora", lora_request=ADAPTER)
    again = call(engine, "ensure_lora", lora_request=LoRARequest("a", path="/not/read"))
    engine.remove_lora("a")
    with pytest.raises(RequestError, match="Unknown adapter 'a'"):
        call(engine, "ensure_lora", lora_request=LoRARequest("a"))
    return first.digest, again == first


@scenario(refused_in="asleep updating", lora_request=ADAPTER)
def update_lora(engine):
    before = engine.policy_version
    report = call(engine, "update_lora", lora_request=ADAPTER, version=before + 3, timeout=60)
    assert report.version == before + 3
    with pytest.raises(StaleVersionError, match="must be more than"):
        call(engine, "update_lora", lora_request=random_adapter(tiny_model(), "a", seed=2), version=before + 3)
    found = last_of(engine, "hello", SHORT, lora_request="a").outputs[0]
    assert engine.policy_version == before + 3 == found.version_spans[0].policy_version
    return report.digest, report.num_tensors, found.token_ids


@scenario(lora_request="a")
def pin_lora(engine):
    with pytest.raises(RequestError, match="Unknown adapter 'a'"):
        engine.pin_lora("a")
    engine.add_lora(ADAPTER)
    found = engine.pin_lora("a").is_pinned, engine.list_loras()[0].is_pinned
    engine.remove_lora("a")
    return found
