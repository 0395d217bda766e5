"""The bulk worker: a process that turns rows and changes into Arrow."""
