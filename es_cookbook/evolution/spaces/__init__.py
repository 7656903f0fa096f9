"""Search spaces: which parameters a genome perturbs, and how noise maps to them."""
