"""Memory and time of a Job before it runs, what fits, and how."""
