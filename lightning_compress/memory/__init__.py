"""Where bytes live during a run, and how many there are. Start with `store` (weights) and `activations` (values between
steps), which the calibration's loop uses; `placement` says where they put things.

- from disk: `source` (which stored tensors make a parameter; `naming`: for transformers), by `files` (safetensors),
  `pickled` (a Lightning checkpoint), `sharded` (torch.distributed.checkpoint) and `dequantized` (FP8, MXFP4)
- ways: `transfer` (host and device), `scratch` (a file), `calls` (weights for code that nobody has recorded)
- foreseen: `needs` (the table of a run), `budget` (what of it fits), `tracker` and `work` (counted by operators)
- the process: `heap`, `buffers`, `garbage`, `host`, `workspaces`
"""
