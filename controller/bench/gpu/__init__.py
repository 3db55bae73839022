"""`make gpu`: what a device computes, how fast, and how well it is predicted, in one command."""
