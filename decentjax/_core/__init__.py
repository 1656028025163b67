"""Parts of the library that no user imports."""
