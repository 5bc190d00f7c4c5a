"""Solvers: from a weight and statistics of its inputs to integer codes and scales. Pure functions of tensors."""
