"""Adapters in the core: which slot one gets, who gives way, and whose KV serves whom."""

import pytest
from msgspec.structs import replace

from rollout_engine.base.errors import LifecycleError, RequestError, StaleVersionError
from rollout_engine.base.lora_request import LoRAInfo, LoRARequest
from rollout_engine.core.adapters import AdapterTable


def _put(table, name, revision=0, digest="", num_uses=lambda adapter: 0):
    info = LoRAInfo(name, revision, 8, 100, digest or name, 0)
    table.put(table.place(name, num_uses), info)
    table.check_integrity()


def _names(table):
    return [info.name for info in table.list()]


def test_the_least_recently_used_adapter_gives_way():
    table = AdapterTable(2)
    for name in "ab":
        _put(table, name)
    table.use("a")
    _put(table, "c")
    assert _names(table) == ["a", "c"]
    assert table.get("c").slot == 1


def test_pinned_adapters_and_those_in_use_stay():
    table = AdapterTable(2)
    for name in "ab":
        _put(table, name)
    table.pin("a")
    with pytest.raises(LifecycleError, match=r"max_loras=2, and none can give way: 'a' \(pinned\), 'b' \(3 requests\)"):
        table.place("c", lambda adapter: 3)
    assert _names(table) == ["a", "b"]
    _put(table, "c")
    assert _names(table) == ["a", "c"] and table.get("a").info.is_pinned


def test_a_known_name_keeps_its_slot_and_gets_a_new_serial_number():
    table = AdapterTable(2)
    _put(table, "a")
    before = table.get("a").serial
    _put(table, "a", revision=1, digest="other")
    assert table.get("a").slot == 0 and table.get("a").serial == before + 1


def _info(name, revision=0, digest=""):
    return LoRAInfo(name, revision, 8, 100, digest or name, 0)


def _changes_version(table, name, digest):
    return table.plan_add(_info(name, 9, digest), 4).policy_version == 5


def test_other_values_need_a_higher_revision():
    table = AdapterTable(2)
    assert table.plan_add(_info("a", 0, "x"), 4) == replace(_info("a", 0, "x"), policy_version=4)
    _put(table, "a", revision=3, digest="x")
    for revision in (0, 3):
        with pytest.raises(RequestError, match=f"revision={revision} .* more than 3, the revision of the adapter 'a'"):
            table.plan_add(_info("a", revision, "y"), 4)
    assert table.plan_add(_info("a", 4, "y"), 4) == replace(_info("a", 4, "y"), policy_version=5)


def test_values_that_are_there_get_the_higher_revision():
    table = AdapterTable(2)
    _put(table, "a", revision=3, digest="x")
    for revision, expected in ((0, 3), (9, 9), (2, 9)):
        assert table.plan_add(_info("a", revision, "x"), 4) is None
        assert table.get("a").info.revision == expected


def test_an_update_is_the_next_version_under_a_revision_of_its_own():
    table = AdapterTable(2)
    assert table.plan_update(_info("a", 0, "x"), None, 4) == replace(_info("a", 0, "x"), policy_version=5)
    table.put(0, replace(_info("a", 3, "x"), policy_version=7))
    assert table.plan_update(_info("a", 0, "x"), 7, 7) is None
    again, later = table.plan_update(_info("a", 0, "x"), None, 7), table.plan_update(_info("a", 9, "y"), 12, 7)
    assert (again.revision, again.policy_version) == (4, 8) and (later.revision, later.policy_version) == (9, 12)
    with pytest.raises(StaleVersionError, match="version=7 is not allowed: must be more than 7, the live version"):
        table.plan_update(_info("a", 0, "y"), 7, 7)


def test_a_request_is_served_in_its_revision_or_a_later_one():
    table = AdapterTable(2)
    assert table.find_served(LoRARequest("a", path="p")) is None
    with pytest.raises(RequestError, match="Unknown adapter 'a'"):
        table.find_served(LoRARequest("a"))
    _put(table, "a", revision=3)
    served = table.get("a").info
    assert table.find_served(LoRARequest("a")) == table.find_served(LoRARequest("a", path="p", revision=3)) == served
    assert table.find_served(LoRARequest("a", path="p", revision=4)) is None


def test_an_adapter_in_use_is_not_removed():
    table = AdapterTable(1)
    _put(table, "a")
    with pytest.raises(LifecycleError, match="remove_lora: 2 unfinished requests use 'a'"):
        table.remove("a", lambda adapter: 2)
    assert table.remove("a", lambda adapter: 0).info.name == "a"
    assert table.remove("a", lambda adapter: 0) is None


def test_a_name_that_comes_back_with_other_values_is_a_new_version():
    table = AdapterTable(2)
    assert not _changes_version(table, "a", "x")
    _put(table, "a", digest="x")
    assert _changes_version(table, "a", "y") and not _changes_version(table, "b", "y")
    table.remove("a", lambda adapter: 0)
    assert _changes_version(table.copy(), "a", "y") and not _changes_version(table, "a", "x")


def test_names_that_are_gone_are_remembered_in_bounded_memory(monkeypatch):
    monkeypatch.setattr("rollout_engine.core.adapters._MAX_REMEMBERED", 3)
    table = AdapterTable(1)
    for name in "abcde":
        _put(table, name)
    assert not _changes_version(table, "a", "other")
    assert all(_changes_version(table, name, "other") for name in "bcde")


def test_other_values_of_a_served_adapter_are_a_version_however_many_names_came_and_went(monkeypatch):
    monkeypatch.setattr("rollout_engine.core.adapters._MAX_REMEMBERED", 3)
    table = AdapterTable(2)
    _put(table, "served")
    table.pin("served")
    for name in "abcdefg":
        _put(table, name)
    assert _changes_version(table, "served", "other")


def test_an_unknown_name_is_refused_with_the_closest_one():
    table = AdapterTable(2)
    with pytest.raises(RequestError, match="Unknown adapter 'policy'. Add it first"):
        table.get("policy")
    _put(table, "polity")
    with pytest.raises(RequestError, match="Did you mean 'polity'"):
        table.use("policy")


def test_requests_of_different_adapters_share_no_kv(make_rig):
    rig = make_rig(block_size=4)
    for name in "xy":
        _put(rig.core.adapters, name)
    for request_id, lora in (("base", ""), ("x", "x"), ("y", "y"), ("x again", "x"), ("base again", "")):
        rig.add(request_id, range(16), max_tokens=1, lora=lora)
        rig.run()
    cached = {name: end.num_cached_tokens for (name, _), end in rig.ends.items()}
    assert cached == {"base": 0, "x": 0, "y": 0, "x again": 12, "base again": 12}
    _put(rig.core.adapters, "x", revision=1, digest="other")
    rig.add("x, other values", range(16), max_tokens=1, lora="x")
    rig.run()
    assert rig.ends["x, other values", 0].num_cached_tokens == 0
    rig.assert_clean()


def test_a_turn_goes_on_only_in_the_tail_of_its_own_adapter(make_rig):
    rig = make_rig(block_size=16)
    _put(rig.core.adapters, "x")
    rig.add("first", range(4), max_tokens=3, lora="x")
    rig.run()
    history = [*range(4), *rig.tokens["first", 0], 5]
    rig.add("of another", history)
    rig.add("its own", history, lora="x")
    rig.run()
    assert [rig.ends[name, 0].num_cached_tokens for name in ("of another", "its own")] == [0, 6]
    rig.assert_clean()


def test_the_runner_hears_of_each_sequences_slot(make_rig):
    rig = make_rig()
    for name in "xy":
        _put(rig.core.adapters, name)
    rig.add("base")
    rig.add("y", lora="y", n=2)
    rig.run()
    slots = {rig.label(new.sequence_id): new.adapter_slot for work in rig.works for new in work.new}
    assert slots == {"base": -1, "0_y": 1, "1_y": 1}


def test_unfinished_requests_are_counted_by_adapter(make_rig):
    rig = make_rig()
    _put(rig.core.adapters, "x")
    adapter = rig.core.adapters.get("x")
    rig.add("one", lora="x")
    rig.add("two", lora="x", n=3)
    rig.add("base")
    assert rig.core.num_using(adapter) == 2
    rig.run()
    assert rig.core.num_using(adapter) == 0


def test_a_request_under_an_unknown_adapter_is_refused(make_rig):
    rig = make_rig()
    with pytest.raises(RequestError, match="Unknown adapter 'x'"):
        rig.add("one", lora="x")
    assert not rig.core.has_unfinished_requests()
