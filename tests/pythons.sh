#!/bin/sh
# Runs the tests that need no model under several versions of Python: pythons.sh 3.11 3.12 3.13
# Each that this machine has gets an environment in build/; one that it lacks is named, and fails nothing. Where pip finds
# no CPU build of torch for it, it takes the CUDA build, some gigabytes, whose Triton is not the pinned one.
set -eu
cd "$(dirname "$0")/.."
find_python() {
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
        if "$candidate" -c "" 2> /dev/null; then
            echo "$candidate"
            return
        fi
    done
}

for version in "$@"; do
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        echo "Python $version: not on this machine, not tested"
        continue
    fi
    dir=build/python-$version
    if [ ! -e "$dir/installed" ] || [ pyproject.toml -nt "$dir/installed" ] || [ constraints.txt -nt "$dir/installed" ]; then
        "$python" -m venv "$dir"
        grep -v "^triton==" constraints.txt > "$dir/constraints.txt"
        "$dir/bin/python" -m pip install --quiet --constraint "$dir/constraints.txt" --editable ".[dev,examples,otel]"
        touch "$dir/installed"
    fi
    echo "$("$dir/bin/python" --version): contract, core and unit tests"
    "$dir/bin/python" -m pytest -q -m "not slow" --numprocesses 2 --dist loadfile \
        tests/contract tests/unit/core tests/unit/batches tests/unit/rollouts tests/unit/execution
done
