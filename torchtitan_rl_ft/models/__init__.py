"""Model directories that this package makes itself."""
