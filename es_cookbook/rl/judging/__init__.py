"""Language models as judges of two answers, and tournaments among the answers of a group."""
