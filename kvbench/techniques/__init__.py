"""Parts that several methods share: families, calibration, clusters, codebooks, trained parts and their training."""
