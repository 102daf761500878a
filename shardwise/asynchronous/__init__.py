"""Training without lockstep: a parameter server, its workers, and what they say to each other."""
