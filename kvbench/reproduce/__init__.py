"""Published numbers and findings, next to kvbench's measurements: read, planned, run and judged."""
