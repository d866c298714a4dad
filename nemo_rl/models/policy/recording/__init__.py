"""What the passes of a worker show to those who look on."""
