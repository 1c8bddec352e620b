"""Published numbers and findings, beside what kvbench measures: read, planned, run and judged."""
