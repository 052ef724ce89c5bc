#!/bin/sh
# Makes the environments that the tests of trainers' adapters run in: make_trainers.sh DIR. Takes minutes.
# A trainer has one of its own where its versions exclude another's; each has its constraints file here.
set -eu
dir=${1:?the directory to make}
make() {
    tests/make_environment.sh "$dir/$1" "tests/trainers/constraints-$1.txt" "$2"
}
make trl examples,trl
PYTHONDONTWRITEBYTECODE= "$dir/trl/bin/python" -W ignore -c "import reasoning_gym"  # it warns of its syntax once
touch "$dir/installed"
