"""Which wiring was a draft trained under? The declared one and its near-misses, compared over captured data."""
