"""SCBench (arXiv 2412.10319): its twelve tasks from its data, and tasks in some of its formats with generated data."""
