"""A second answer after a cue to reconsider: is it better, and by how sure the first one was."""
