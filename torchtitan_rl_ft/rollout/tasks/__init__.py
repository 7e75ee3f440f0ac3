"""Tasks that come with the package: prompt sources and rewards."""
