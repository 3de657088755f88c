"""Keep everything that is logged in memory, as time series by metric."""
