"""Realistic programs shared by the tests, the benchmarks and the demo; none knows the library."""
