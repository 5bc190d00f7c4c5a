"""The model as a graph: tracing, executing, and cutting it into stages.

`trace.trace` from the top: `synthesize` makes the batch that is recorded; `cut.first_cut` says which modules are single
calls; `_attempt` runs the step once under `recorder.recording`, where `record.Attempt` decides at each call of a module
what becomes of it, and `outputs.Outputs` what it returns. What cannot run on fake tensors is seen in real runs
(`observed`), from which `symbolic` tells what it returns on any batch, and `expected` whether a later batch keeps to
that. What fails goes to `fallback.fall_back`, which gives another cut, and to `fallback.otherwise`, which gives another
batch; then it is tried again. `bounds`, `python_functions` and `decisions` keep what code makes of sizes and values
right for all batches.
"""
