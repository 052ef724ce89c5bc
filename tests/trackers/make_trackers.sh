#!/bin/sh
# Makes the environment that has the trackers: make_trackers.sh DIR.
set -eu
dir=${1:?the directory to make}
tests/make_environment.sh "$dir" tests/trackers/constraints-trackers.txt view tensorboard wandb trackio mlflow
touch "$dir/installed"
