"""Every operator in plain torch: the oracle of kernel tests, and the fallback on any device."""
