"""This process: what it is doing, its threads, and its addresses."""
