"""`python -m rollout_engine`."""

import sys

from rollout_engine.cli.main import main

sys.exit(main())
