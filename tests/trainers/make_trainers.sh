#!/bin/sh
# Makes the environments that the tests of trainers' adapters run in: make_trainers.sh DIR. Takes minutes.
# A trainer has one of its own where its versions exclude another's; each has its constraints file here.
# The rollout worker of TRL's asynchronous trainer wants aiohttp and requests.
set -eu
dir=${1:?the directory to make}
make() {
    name=$1
    shift
    tests/make_environment.sh "$dir/$name" "tests/trainers/constraints-$name.txt" "$@"
}
make trl examples,server,trl aiohttp requests
PYTHONDONTWRITEBYTECODE= "$dir/trl/bin/python" -W ignore -c "import reasoning_gym"  # it warns of its syntax once
touch "$dir/installed"
