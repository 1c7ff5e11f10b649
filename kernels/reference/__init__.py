"""Every operator in plain torch: the oracle of the kernels' tests, and what runs anywhere."""
