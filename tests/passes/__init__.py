"""Tests of the passes floor."""
