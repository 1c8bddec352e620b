"""Reports of finished runs: charts, tables, and an HTML page in one file."""
