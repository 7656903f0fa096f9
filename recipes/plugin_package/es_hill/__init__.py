"""Parts for es_cookbook from a package of its own."""
