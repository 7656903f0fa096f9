"""Many runs: a search over options on several workers, or a list of Configs one after the other.

`sweep` tries options (`search`) under several seeds, each run in a separate process with its share
of the cores (`worker`), and prints a table of the results. `run_all` runs any Configs in this
process. A run directory says whether its run is complete, so the same call continues an interrupted
sweep, and nothing is run twice.
"""

from es_cookbook.plugins.sweep.in_turn import (
    batch_of,
    is_complete,
    refuse_unequal_rollouts,
    rollouts_of,
    run_all,
)
from es_cookbook.plugins.sweep.loop import Make, SweepSettings, sweep
from es_cookbook.plugins.sweep.many_runs import by_label, check_comparison, check_not_set
from es_cookbook.plugins.sweep.search import Range, Space, Value, Values

__all__ = [
    "Make",
    "Range",
    "Space",
    "SweepSettings",
    "Value",
    "Values",
    "batch_of",
    "by_label",
    "check_comparison",
    "check_not_set",
    "is_complete",
    "refuse_unequal_rollouts",
    "rollouts_of",
    "run_all",
    "sweep",
]
