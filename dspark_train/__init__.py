"""Train, calibrate, export and run DFlash / DSpark drafters for lossless speculative decoding."""

__version__ = "0.1.0"
