"""Measure speed, memory and compile time: `python -m benchmarks`."""
