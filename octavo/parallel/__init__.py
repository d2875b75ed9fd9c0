"""A model over several devices."""
