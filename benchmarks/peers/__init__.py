"""Eyas beside its peers: what `bench_peers.py` is made of. The `*_worker.py` here run in the engines' environments."""
