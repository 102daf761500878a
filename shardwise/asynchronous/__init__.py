"""What training without lockstep is made of: messages and connections of a parameter server, its scheduler,
and memory that processes share. The drivers (drivers/) use it."""
