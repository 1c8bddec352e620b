"""lm-evaluation-harness in both directions: our models and methods in its runs, and its tasks in ours."""
