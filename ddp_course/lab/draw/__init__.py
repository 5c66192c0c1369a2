"""What more than one chapter draws: schematics, and plots of measured data."""
