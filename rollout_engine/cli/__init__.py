"""The command line: `python -m rollout_engine COMMAND`, also installed as `rollout-engine`. One file per command."""
