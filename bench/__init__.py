"""What `make bench` runs: the engine against its peers and against the arithmetic it cannot avoid, as ratios of one run."""
