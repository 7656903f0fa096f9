"""Many runs: a search over options on several workers, or a list of Configs one after the other.

`sweep` tries options (`search`) under several seeds, each run in a separate process with its share
of the cores (`worker`), and prints a table of the results. `run_all` runs any Configs in this
process. A run directory says whether its run is complete, so the same call continues an interrupted
sweep, and nothing is run twice.
"""
