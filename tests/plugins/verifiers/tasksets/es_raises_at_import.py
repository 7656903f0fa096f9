"""A package that cannot be imported."""

raise RuntimeError("this needs\na licence")
