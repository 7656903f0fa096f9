"""Many Configs: in turn, or several at a time over a space of options, with a table in the end.

`sweep` tries options (`search`) under several seeds, each run in a process of its own with its
share of the cores (`worker`), stops those that fall behind and makes a table of what came out.
`run_all` runs any Configs one after the other in this process.

A run directory says by itself whether its run is complete, so all of it is repeated until it is
done: nothing is run twice, and what was interrupted goes on.
"""

from es_cookbook.plugins.sweep.in_turn import (
    batch_of,
    is_complete,
    refuse_unequal_rollouts,
    rollouts_of,
    run_all,
)
from es_cookbook.plugins.sweep.loop import Make, SweepSettings, sweep
from es_cookbook.plugins.sweep.search import Range, Space, Value, Values

__all__ = [
    "Make",
    "Range",
    "Space",
    "SweepSettings",
    "Value",
    "Values",
    "batch_of",
    "is_complete",
    "refuse_unequal_rollouts",
    "rollouts_of",
    "run_all",
    "sweep",
]
