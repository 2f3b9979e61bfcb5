"""Bring the loop back: which checkpoint (`point`), in which order (`machine`), with which processes.

`point` and `machine` are pure and replay as unit tests; `coordinator` acts out what they decide
through a `launcher`. The order and its reasons: docs/explanation/recovery.md.
"""
