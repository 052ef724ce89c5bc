#!/bin/sh
# Makes the environments that the tests of heavy adapters run in: make_worlds.sh DIR. Takes minutes and two gigabytes.
# Two of them, as verifiers 0.4 and openenv need different versions of mcp.
# Where pip finds no CPU build of torch by itself, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels.
set -eu
dir=${1:?the directory to make}
make() {
    ${PYTHON:-python3} -m venv "$dir/$1"
    "$dir/$1/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile \
        --constraint "tests/envs/constraints-$1.txt" torch==2.13.0 hypothesis pytest --editable ".[$2]"
}
make verifiers-0.4 math-verify,mcp,skyrl-gym,torchrl,verifiers,textarena
make verifiers-0.3 datasets,mcp,openenv,openenv-server,verifiers
touch "$dir/installed"
