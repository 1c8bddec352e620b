"""What every method is measured against."""
