"""``tandem doctor``: a survey of a cluster, and its findings."""
