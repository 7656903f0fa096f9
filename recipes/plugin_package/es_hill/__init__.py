"""Parts for es_cookbook from a separate package."""
