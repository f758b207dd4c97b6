"""Where starting on clusters, rehearsal and preflight will be."""
