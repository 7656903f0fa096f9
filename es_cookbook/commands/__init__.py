"""What people do with a run: resume, fork, rewind, play, export, push, plan, compare."""
