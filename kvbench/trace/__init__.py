"""Trace simulation: cache policies on recorded requests, without a model."""
