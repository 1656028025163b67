"""What the graph does to accuracy: a grid of graphs and scales."""
