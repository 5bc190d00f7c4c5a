"""The model as a graph: tracing, executing, and cutting it into stages.

`trace.trace` from the top: `synthesize` makes the batch that is recorded; `_first_cut` says which modules are single
calls; `_attempt` runs the step once under `compat.recording`, where `record.Attempt` decides at each call of a module
what becomes of it (`observed` tells what calls return that cannot run on symbolic sizes). What fails goes to
`fallback.fall_back`, which gives another cut, and to `fallback.otherwise`, which gives another batch; then it is tried
again. `bounds`, `python_functions` and `decisions` keep what code makes of sizes and values right for all batches.
"""
