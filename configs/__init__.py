"""Hydra groups of lightning_compress; `hydra.searchpath=[pkg://lightning_compress.configs]` reaches them from other
applications."""
