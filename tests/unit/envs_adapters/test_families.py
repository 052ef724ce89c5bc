"""Environments by name and of the user's own."""

import sys

import pytest

from envs_adapters import make_env
from envs_adapters.families import FAMILIES, import_package
from rollout_engine.base.errors import ConfigError


class Countdown:
    def __init__(self, start=3):
        self.start = start


def test_a_class_of_the_users_own_is_made_with_its_arguments():
    spec = make_env(Countdown, start=5)
    assert spec().start == 5
    assert (spec.name, spec.placement, spec.step_timeout) == ("Countdown", "threads", 60.0)


def test_where_it_runs_is_chosen_by_the_caller():
    spec = make_env(Countdown, placement="processes", num_workers=2, step_timeout=1)
    assert (spec.placement, spec.num_workers, spec.step_timeout) == ("processes", 2, 1)


@pytest.mark.parametrize(
    "target, options, message",
    [
        ("reasoning_gim:x", {}, "Unknown family 'reasoning_gim'. Did you mean 'reasoning_gym'"),
        ("nothing", {}, "'nothing' names no environment; give 'family:name'. Unknown family"),
        ("agnt:my_agent.py", {}, "Unknown family 'agnt'. Did you mean 'agent'"),
        ("agent:my_agent.py", {}, "rollout\\(tasks, env='agent:COMMAND'\\)"),
        (Countdown(), {}, "Give the class itself"),
        (Countdown, {"placement": "moon"}, "'threads' or 'processes'"),
        (Countdown, {"num_workers": 0}, "at least 1"),
        (Countdown, {"step_timeout": -1}, "positive number of seconds"),
        (Countdown, {"step_timeout": True}, "positive number of seconds"),
    ],
)
def test_what_does_not_fit_is_refused(target, options, message):
    with pytest.raises(ConfigError, match=message):
        make_env(target, **options)


def test_the_package_of_a_family_is_imported(tmp_path, monkeypatch):
    (tmp_path / "needed_package.py").write_text("WAS_IMPORTED = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    family = FAMILIES["reasoning_gym"]
    monkeypatch.setitem(FAMILIES, "reasoning_gym", family._replace(package="needed_package"))
    import_package(family.module.make)
    assert "needed_package" in sys.modules
    import_package(tmp_path)  # no family's
    monkeypatch.delitem(sys.modules, "needed_package")
