"""Write what was quantized as a standard compressed-tensors checkpoint, read it back, compare."""
