#!/bin/sh
# Makes the environment that drives a browser: make_browser.sh DIR. The browser itself is the system's: Chromium and
# ChromeDriver (Debian: apt-get install chromium chromium-driver).
set -eu
dir=${1:?the directory to make}
tests/make_environment.sh "$dir" tests/browser/constraints-browser.txt view selenium
touch "$dir/installed"
