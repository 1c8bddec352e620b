"""Parts that several methods share: base classes for families, calibration, clusters, codebooks, trained parts."""
