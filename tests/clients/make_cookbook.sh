#!/bin/sh
# Makes the environment that recipes of Tinker's cookbook run in: make_cookbook.sh DIR. Takes minutes, and 1 GB.
# The cookbook's versions exclude this package's, whose server runs elsewhere.
set -eu
dir=${1:?the directory to make}
${PYTHON:-python3} -m venv "$dir"
"$dir/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile \
    --constraint tests/clients/constraints-cookbook.txt torch==2.13.0 pytest tinker "tinker-cookbook[math-rl]"
touch "$dir/installed"
