"""Pipeline schedules as data: generated, printed, simulated, and proved before they run."""
