"""`build()` a job, `steps()` as a generator, and what drives them. Import the modules by name: most need
torch."""
