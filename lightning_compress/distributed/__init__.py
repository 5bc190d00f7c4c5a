"""Ranks: what they say to one another, and who does what."""
