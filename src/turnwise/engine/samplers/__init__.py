"""Samplers in other processes: an engine that only samples, or a learner that samples too."""
