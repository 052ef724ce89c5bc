#!/bin/sh
# Makes the environments that the tests of trainers' adapters run in: make_trainers.sh DIR. Takes minutes.
# A trainer has one of its own where its versions exclude another's; each has its constraints file here.
# The rollout worker of TRL's asynchronous trainer wants aiohttp and requests, TorchRL's RayLLMCollector wants Ray, and the
# tests of wrapped models want peft.
set -eu
dir=${1:?the directory to make}
make() {
    name=$1
    shift
    tests/make_environment.sh "$dir/$name" "tests/trainers/constraints-$name.txt" "$@"
}
make trl examples,server,trl aiohttp peft requests
make torchrl examples,ray,torchrl
for name in trl torchrl; do
    PYTHONDONTWRITEBYTECODE= "$dir/$name/bin/python" -W ignore -c "import reasoning_gym"  # it warns of its syntax once
done
touch "$dir/installed"
