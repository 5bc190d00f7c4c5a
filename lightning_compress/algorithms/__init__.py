"""Solvers: from a weight and statistics of its inputs to integer codes and scales. Pure functions of tensors.

Start with `base` (what an algorithm is) and `rtn`, the simplest one; then `gptq`. `catalog` names them.

- what codes and scales can be: `grids`, `scales`
- of GPTQ: `factor` (Cholesky), `nearest_plane` (the walk through the channels, `kernels` on a GPU), `refit`; and with a
  reference run `target`, `correction`, `gptaq`
- how work falls into pieces: `tiling`, `rows`, `threads`
"""
