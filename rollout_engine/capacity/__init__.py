"""A simulation of a whole fleet from measured costs of steps, before there is one."""
