#!/bin/sh
# Makes a virtual environment with this package and some of its extras: make_environment.sh DIR CONSTRAINTS EXTRAS.
# Where pip finds no CPU build of torch by itself, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels.
set -eu
${PYTHON:-python3} -m venv "$1"
"$1/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile \
    --constraint "$2" torch==2.13.0 hypothesis pytest --editable ".[$3]"
