"""The imperative shell: the loop's thread, streams, feedback and wiring."""
