"""Is decentralized training worth it on a cluster, and with which topology?"""
