"""What `ckptstore bench` measures: limits of the machine, ckptstore, and other libraries, on one state in one run.

It stands beside the library, which never imports it, and uses of it what users use: `begin`, `Checkpointer`,
`save`, `restore`. What the figures mean and how they are taken: docs/how-to/bench.md.
"""
