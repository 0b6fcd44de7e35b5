"""Benchmarks: scripts that measure the library, and the programs they share."""
