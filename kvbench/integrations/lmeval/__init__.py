"""lm-evaluation-harness: kvbench as a model of lm_eval, and tasks of lm_eval in kvbench."""
