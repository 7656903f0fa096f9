"""Tasks and harnesses of other libraries, as datasets and Envs of this one."""
