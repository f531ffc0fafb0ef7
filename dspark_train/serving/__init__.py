"""Many requests at a time: simulated, scheduled, served."""
