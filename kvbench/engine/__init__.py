"""A conversation on one model under one method, and the counters of its stores."""
