"""Submissions of runs, their verification, the leaderboard's static site, and its server."""
