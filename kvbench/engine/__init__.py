"""One conversation on one model under one method, and what its stores count."""
