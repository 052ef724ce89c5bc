#!/bin/sh
# Makes the environment that builds the site of docs/: make_site.sh DIR
set -eu
dir=${1:?the directory to make}
tests/make_environment.sh "$dir" tests/site/constraints-site.txt server,view mkdocs-material mkdocstrings mkdocstrings-python ruff
touch "$dir/installed"
