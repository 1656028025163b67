"""Whether decentralized training is faster on a cluster, and with which topology."""
