"""A leaderboard server: an HTTP API for submissions, a verification worker, and the site of accepted runs."""
