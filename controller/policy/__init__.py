"""The control law: pure functions of a view and a time; no clock, thread, SQL, web or torch."""
