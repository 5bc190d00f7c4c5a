"""Recipes: what to quantize, how, and with which algorithm."""
