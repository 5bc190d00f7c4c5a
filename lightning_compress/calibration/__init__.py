"""One calibration run. Start with `loop`, which is all of it: every subgraph in turn is onloaded, run and solved.

- before: `target` (what is called on a batch), `batches` (the calibration set, checked), `recording` (its graph),
  `prepare` (graph, recipe and data become the `Calibration` that `loop` runs)
- the loop's parts: `flow` (batches through a step), `observe` (statistics of what they bring), `reference` (the
  original model beside), `solve` (groups of modules, shared out over ranks), `static_inputs` and `quantized` (how a
  module computes from then on), `boundary` (activations kept on disk), `records` (what is told)
- `resume`: fingerprints, and the manifest that an interrupted run continues from
- `footprint`, with `amounts`, `repeats` and `stand_ins`: what memory and work a run will take, on fake tensors
- `evaluate`: a forward of the same parts, without a recipe
"""
