"""Scorers of published suites, and the text metrics that they use."""
