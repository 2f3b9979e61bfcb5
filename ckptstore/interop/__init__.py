"""Bridges to other libraries' states and checkpoints; each module imports what it bridges to."""
