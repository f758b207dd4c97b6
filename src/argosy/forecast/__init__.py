"""From small runs to a large one: curves with bands, fitted to tables of measurements."""
