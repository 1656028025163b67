"""The effect of the graph on accuracy: a grid of graphs and scales."""
