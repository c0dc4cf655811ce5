"""What rl_bridge relies on in other packages, and the check that reads it in their wheels."""
