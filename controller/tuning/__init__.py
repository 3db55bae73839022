"""The door of tuning: settings that keep more promises, found in the simulator."""
