#!/bin/sh
# Makes a virtual environment with this package and some of its extras:
# make_environment.sh DIR CONSTRAINTS EXTRAS [PACKAGE ...]
# Where pip finds no CPU build of torch by itself, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels.
set -eu
dir=$1 constraints=$2 extras=$3
shift 3
${PYTHON:-python3} -m venv "$dir"
"$dir/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile \
    --constraint "$constraints" torch==2.13.0 hypothesis pytest "$@" --editable ".[$extras]"
