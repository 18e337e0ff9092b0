"""Data: sources -> split -> normalisation -> order -> batches. Everything is addressed by position."""
