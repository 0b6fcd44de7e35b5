"""Tests of overlap.hlo."""
