"""Tools beside a run: they look at runs, compare, replay, plan, shrink and import them, and serve pages.

`nemo_rl` imports none of this package; `nemo-rl` finds its subcommands by name.
"""
