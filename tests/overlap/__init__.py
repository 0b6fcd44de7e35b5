"""Tests of overlap."""
