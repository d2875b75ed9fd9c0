"""Model files changed at random: they must be read, or end in a clear error, and never in anything else."""
