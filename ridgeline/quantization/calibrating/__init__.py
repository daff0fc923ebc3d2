"""`quantize_model`: codes found block by block on calibration data, and kept as they come."""
