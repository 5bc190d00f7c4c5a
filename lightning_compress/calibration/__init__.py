"""One calibration run: `loop.py` is the place to start reading."""
