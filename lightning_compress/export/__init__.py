"""Write what was quantized as a standard compressed-tensors checkpoint, read it back, compare. Start with `writer`.

- of the folder: `checkpoint` (whose it is), `claim` (a lock), `layout` (which tensor is in which shard), `shards`,
  `beside` (configurations and tokenizers; `processors` loads these)
- of tensors: `packing` (codes to what is stored, and the configuration that says so), `packed` (back)
- `verify`, with `outputs` and `copies`: what was written against what is in memory
"""
