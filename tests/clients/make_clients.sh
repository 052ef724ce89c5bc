#!/bin/sh
# Makes the environments that the tests of clients of the HTTP server run in: make_clients.sh DIR. Takes minutes.
# A client has one of its own where its versions exclude another's; each has its constraints file here.
set -eu
dir=${1:?the directory to make}
tests/make_environment.sh "$dir/openai" tests/clients/constraints-openai.txt renderers,server \
    anthropic inspect-ai "lm-eval[api]" openai openai-agents openenv requests trl
tests/make_environment.sh "$dir/torchrl" tests/clients/constraints-torchrl.txt server requests torchrl
tests/make_environment.sh "$dir/verifiers" tests/clients/constraints-verifiers.txt server verifiers
tests/make_environment.sh "$dir/tinker" tests/clients/constraints-tinker.txt server,tinker
touch "$dir/installed"
