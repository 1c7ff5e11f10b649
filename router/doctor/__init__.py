"""``tandem doctor``: a survey of the cluster and what is wrong with it."""
