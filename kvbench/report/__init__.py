"""Finished runs as charts, tables and a page of one file."""
