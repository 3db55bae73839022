"""The production loop and planner on a virtual clock, against hardware that is a formula."""
