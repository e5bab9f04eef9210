"""What gradients travel on, and how what goes wrong on one rank comes to all."""
