"""Arithmetic: add numbers digit by digit. The recipe where ES raises ability, not form."""
