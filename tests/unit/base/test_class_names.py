"""Classes of the user, named and found in this process and in another."""

import sys
from types import ModuleType

import pytest

from rollout_engine.base.class_names import find_class, import_path, name_elsewhere, name_of
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError


class Found:
    class Within:
        pass


@pytest.fixture
def main(monkeypatch):
    """A `__main__` in which the tests can say what the program was."""
    module = ModuleType("__main__")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_a_class_is_found_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    for kind in (Found, Found.Within):
        assert find_class(name_of(kind, "worker_extensions")) is kind


def test_engine_options_take_classes_names_and_one_of_them_alone():
    for given in (Found, [Found], (Found,), f"{__name__}:Found"):
        for option in ("worker_extensions", "logits_processors"):
            assert getattr(EngineConfig(model="path", **{option: given}), option) == (f"{__name__}:Found",)


def test_a_class_inside_a_function_is_refused():
    class Local:
        pass

    with pytest.raises(ConfigError) as refused:
        EngineConfig(model="path", worker_extensions=[Local])
    assert str(refused.value) == (
        f"worker_extensions: '{__name__}:test_a_class_inside_a_function_is_refused.<locals>.Local' is not found under "
        "that name, by which the engine imports it: define the class at the top level of a module."
    )


def test_a_name_of_another_module_is_the_same_elsewhere(main):
    assert name_elsewhere("package.module:Class", "worker_extensions") == "package.module:Class"


def test_a_class_of_the_program_has_the_name_of_its_file_elsewhere(main, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "my_training.py"
    file.touch()
    main.__file__ = str(file)
    assert name_elsewhere("__main__:Mine", "worker_extensions") == "my_training:Mine"
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    assert name_elsewhere("__mp_main__:Mine", "worker_extensions") == "my_training:Mine"


def test_a_class_of_a_module_that_runs_has_the_modules_name_elsewhere(main):
    main.__spec__ = pytest.__spec__
    assert name_elsewhere("__main__:Mine", "worker_extensions") == "pytest:Mine"


def test_a_class_of_a_program_that_cannot_be_imported_is_refused(main, tmp_path):
    main.__file__ = str(tmp_path / "my_training.py")
    (tmp_path / "my_training.py").touch()
    with pytest.raises(
        ConfigError, match="my_training.py, which the core's process cannot import as 'my_training': put"
    ):
        name_elsewhere("__main__:Mine", "worker_extensions")


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_a_class_of_a_notebook_is_refused(main, file):
    main.__file__ = file
    with pytest.raises(ConfigError, match="logits_processors: '__main__:Mine' is defined at a prompt or in a notebook"):
        name_elsewhere("__main__:Mine", "logits_processors")


def test_relative_folders_are_the_same_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "folder", tmp_path])
    assert import_path() == [str(tmp_path), str(tmp_path / "folder")]
