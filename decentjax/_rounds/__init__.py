"""Parts of rounds that no user imports."""
