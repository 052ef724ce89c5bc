"""Editors and type checkers know every public name, though the package loads them on first use."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rollout_engine
from tests.contract.sources import PACKAGES, ROOT

# What torch and its like declare is not what is asked here, and takes a minute to read.
MYPY_CONFIG = """
[mypy]
follow_imports = silent
[mypy-torch.*,transformers.*,tensordict.*,numpy.*,zmq.*,safetensors.*,tokenizers.*,huggingface_hub.*,tqdm.*,psutil.*]
follow_imports = skip
follow_imports_for_stubs = True
[mypy-prometheus_client.*,opentelemetry.*,triton.*]
follow_imports = skip
"""
PROGRAM = """
import rollout_engine
from rollout_engine import LLM, EngineConfig, exact
reveal_type(LLM("path"))
reveal_type(EngineConfig(model="path").max_num_seqs)
exact.enable
rollout_engine.LLMM
"""


@pytest.mark.parametrize("face", [rollout_engine, rollout_engine.testing], ids=lambda face: face.__name__)
def test_the_block_for_editors_names_what_is_loaded_on_first_use(face):
    tree = ast.parse(Path(face.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    declared = {alias.name: node.module for node in block.body for alias in node.names if alias.name == alias.asname}
    modules = {name: module.rpartition(".")[0] for name, module in getattr(face, "_MODULES", {}).items()}
    assert declared == modules | face._HOMES


@pytest.mark.slow
def test_a_type_checker_knows_public_names_and_finds_misspelt_ones(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(MYPY_CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "--cache-dir=cache", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    *notes, _ = done.stdout.splitlines()
    assert notes == [
        'program.py:4: note: Revealed type is "rollout_engine.faces.llm.LLM"',
        'program.py:5: note: Revealed type is "int"',
        'program.py:7: error: Module has no attribute "LLMM"  [attr-defined]',
    ]


def test_every_package_says_that_it_is_typed():
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []
