#!/bin/sh
# Makes the environment that the tests of verl's adapter run in: make_verl.sh DIR. Takes minutes, and 2 GB.
# verl's versions exclude this package's, so the package is there without what it needs; the engine runs elsewhere.
set -eu
dir=${1:?the directory to make}
${PYTHON:-python3} -m venv "$dir"
pip() {
    "$dir/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile "$@"
}
pip --constraint tests/trainers/constraints-verl.txt torch==2.13.0 verl==0.9.1 httpx msgspec openai pytest safetensors uvicorn
pip --no-deps --editable .
touch "$dir/installed"
