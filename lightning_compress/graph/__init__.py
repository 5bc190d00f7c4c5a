"""The model as a graph: tracing, executing, and cutting it into stages."""
