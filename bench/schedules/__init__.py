"""The grid of schedules: cases, the programs of each, what was measured, and the tables made of it."""
