"""Plans, as pure functions: `save` decides who writes what, `load` which ranges fill what.

They see no clock, store, thread or torch, so that a bad plan replays as a unit test and equal
layouts give equal plans in every process.
"""
