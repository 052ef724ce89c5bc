#!/bin/sh
# Makes the environments that the tests of heavy adapters run in: make_worlds.sh DIR. Takes minutes and two gigabytes.
# Two of them, as verifiers 0.4 and openenv need different versions of mcp.
set -eu
dir=${1:?the directory to make}
make() {
    tests/make_environment.sh "$dir/$1" "tests/envs/constraints-$1.txt" "$2"
}
make verifiers-0.4 math-verify,mcp,skyrl-gym,torchrl,verifiers,textarena
make verifiers-0.3 datasets,mcp,openenv,openenv-server,verifiers
touch "$dir/installed"
