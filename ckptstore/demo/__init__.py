"""The RL loop that the README runs: a small DeepSeek-V4 learns arithmetic by GRPO.

It stands apart from the library, which it uses only through the public names of `ckptstore`.
`config`, `task` and `records` import neither torch nor transformers: the coordinator, which
must be replaced within a fraction of a second, uses only these.
"""
