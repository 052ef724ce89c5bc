"""A simulation of a whole fleet from measured costs of steps: what it would do, before there is one."""
