"""What joins the run store, the plan and the forecast: ladders, registered forecasts, verdicts, comparisons. Nothing here imports JAX."""
