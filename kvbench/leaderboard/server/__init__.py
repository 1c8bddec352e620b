"""A leaderboard that takes submissions: an HTTP API, a worker that verifies, and the site of what was accepted."""
