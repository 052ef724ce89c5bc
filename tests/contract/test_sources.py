"""How the code must look: sizes, docstrings, and what may not appear in it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FORBIDDEN_FILE_NAMES = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|common)$")
FORBIDDEN_CLASS_NAMES = re.compile(r"(Manager|Helper|Utils?)$")
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "__import__", "torch.load"}
# Written in pieces, so that this file does not contain them.
FORBIDDEN_TEXT = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "NotImplemented" + "Error"]))
MACHINE_PATHS = re.compile("(?<![A-Za-z0-9_.])/(?:ro" + "ot|ho" + "me|wo" + "rk|t" + "mp|U" + r"sers)/\w")
TEXT_FILES = {".py", ".md", ".toml", ".txt", ".yaml", ".json", ".cfg", ".cpp", ".h", ""}


def test_files_are_short(sources):
    long = [s.where for s in sources if s.text.count("\n") >= MAX_FILE_LINES and "/kernels/" not in s.where]
    assert not long


def test_functions_fit_on_a_screen(sources):
    long = [
        f"{source.where}:{function.lineno} {function.name}"
        for source in sources
        for function in source.functions()
        if function.end_lineno - _first_line(function) + 1 >= MAX_FUNCTION_LINES
    ]
    assert not long


def _first_line(function: ast.FunctionDef) -> int:
    """Its `def`; of a kernel, which takes a pointer and a stride for each tensor, the line behind its arguments."""
    is_kernel = any("triton.jit" in ast.unparse(each) for each in function.decorator_list)
    return function.body[0].lineno if is_kernel else function.lineno


def test_names_are_nouns_of_the_field(sources):
    files = [s.where for s in sources if FORBIDDEN_FILE_NAMES.search(s.path.stem)]
    classes = [f"{s.where} {c.name}" for s in sources for c in _classes(s) if FORBIDDEN_CLASS_NAMES.search(c.name)]
    assert not files + classes


def test_public_modules_classes_and_functions_have_docstrings(package_sources):
    missing = [
        f"{source.where} {getattr(node, 'name', '')}"
        for source in package_sources
        for node in (source.tree, *_public_definitions(source))
        if not ast.get_docstring(node)
    ]
    assert not missing


def test_functions_around_the_triton_kernels_are_annotated(package_sources):
    """mypy leaves this room alone, because Python's types do not fit what Triton compiles (pyproject.toml)."""
    missing = [
        f"{source.where}:{function.lineno} {function.name}"
        for source in package_sources
        if source.module.startswith("rollout_engine.kernels.triton")
        for function in source.functions()
        if not any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
        if function.returns is None
        or any(arg.annotation is None and arg.arg not in ("self", "cls") for arg in _arguments(function))
    ]
    assert not missing


def test_nothing_runs_code_from_data(package_sources):
    imports = [
        f"{s.where}:{i.line} {i.name}"
        for s in package_sources
        for i in s.imports()
        if i.name.split(".")[0] in UNSAFE_MODULES
    ]
    calls = [f"{s.where}:{c.lineno}" for s in package_sources for c in _calls(s) if ast.unparse(c.func) in UNSAFE_CALLS]
    trusts = [
        f"{s.where}:{c.lineno}"
        for s in package_sources
        for c in _calls(s)
        for keyword in c.keywords
        if keyword.arg == "trust_remote_code"
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
    ]
    assert not imports + calls + trusts


def test_nothing_is_left_for_later(sources):
    assert not [s.where for s in sources if FORBIDDEN_TEXT.search(s.text)]


def test_no_path_of_one_machine_in_any_file():
    files = [path for path in _repository_files() if path.suffix in TEXT_FILES]
    assert len(files) > 20
    assert not [str(path) for path in files if MACHINE_PATHS.search(path.read_text(encoding="utf-8"))]


def _classes(source):
    return (node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef))


def _calls(source):
    return (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))


def _arguments(function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _public_definitions(source):
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return (n for n in source.tree.body if isinstance(n, kinds) and not n.name.startswith("_"))


def _repository_files():
    skipped = {".git", ".venv", "runs", "build", "dist", "__pycache__"}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.is_file() and not any(
            p in skipped or p.endswith(("_cache", ".egg-info")) or p == ".hypothesis" for p in parts
        ):
            yield path
