"""Calibration-based post-training quantization as one more stage of a PyTorch Lightning Trainer."""
