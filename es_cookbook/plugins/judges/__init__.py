"""Language models as judges: of one answer as a reward, of two in tournaments of a group."""
