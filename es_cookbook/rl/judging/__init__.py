"""Language models as judges: of one answer, or of two, and tournaments among a group's answers."""
